"""The peak memory of a run, predicted and measured, side by side in its run file."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.events import say
from halfstep.jobs.job import Job
from halfstep.planning import predict_peak
from halfstep.planning.measured import start_counting
from halfstep.precision.policy import Policy
from halfstep.train.config import TrainConfig

__all__ = ["PeakCounter", "compare_memory"]


class PeakCounter:
    """The most memory that a run's tensors took on a GPU; a device that does not count it gives None."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._already = start_counting(device) if device.type == "cuda" else 0

    def peak(self) -> int | None:
        """Bytes at the fullest moment since the start, without what was there before."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) - self._already


def compare_memory(job: Job, policy: Policy, config: TrainConfig, measured: int) -> dict[str, Any]:
    """What was measured, what `halfstep plan` predicts, and the error; no prediction where it does not know the setting."""
    found: dict[str, Any] = {"measured_bytes": measured, "predicted_bytes": None}
    if config.compile or config.gradient_release:
        return found
    numbers = rng_state()
    estimate = predict_peak(
        job, policy, config.batch, accumulate=config.accumulate, ema=config.ema is not None, seed=config.seed
    )
    restore_rng(numbers)
    if estimate is None:
        return found
    error = estimate.peak_bytes / measured - 1
    say(
        f"Peak memory: {measured / 2**30:.2f} GiB measured, {estimate.peak_bytes / 2**30:.2f} predicted ({error:+.1%})."
    )
    return found | {"predicted_bytes": estimate.peak_bytes, "predicted_parts": dict(estimate.peak.breakdown)}
