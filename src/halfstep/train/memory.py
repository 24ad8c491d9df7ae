"""Measured and predicted peak memory of a run, for its run file."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.events import log_info
from halfstep.hardware.units import bytes_text
from halfstep.jobs.job import Job
from halfstep.planning import predict_peak
from halfstep.planning.measured import start_counting
from halfstep.precision.policy import Policy
from halfstep.train.config import DEFAULT_BATCH, TrainConfig

__all__ = ["PeakCounter", "compare_memory"]


class PeakCounter:
    """Peak memory of a run's tensors on a GPU; None on devices without a counter."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._already = start_counting(device) if device.type == "cuda" else 0

    def peak(self) -> int | None:
        """Peak bytes since the start, minus those allocated before."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) - self._already


def compare_memory(job: Job, policy: Policy, config: TrainConfig | None, measured: int) -> dict[str, Any]:
    """The measured peak and the one `halfstep plan` predicts; no prediction for settings that it does not cover, or without any."""
    memory: dict[str, Any] = {"measured_bytes": measured, "predicted_bytes": None}
    if config is None or config.compile or config.gradient_release:
        return memory
    random_numbers = rng_state()
    estimate = predict_peak(
        job,
        policy,
        config.batch or DEFAULT_BATCH,
        accumulate=config.accumulate,
        ema=config.ema is not None,
        recompute=config.recompute,
        seed=config.seed,
    )
    restore_rng(random_numbers)
    if estimate is None:
        return memory
    error = estimate.peak_bytes / measured - 1
    log_info(
        f"Peak memory: {bytes_text(measured)} measured, {bytes_text(estimate.peak_bytes)} predicted ({error:+.1%})."
    )
    return memory | {"predicted_bytes": estimate.peak_bytes, "predicted_parts": dict(estimate.peak.breakdown)}
