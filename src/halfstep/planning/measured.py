"""The same step on a real GPU: torch's own counters, to compare with the prediction.

Two steps run and the second is measured, because the optimizer allocates its states in the first. Everything allocated for
the measurement is freed at the end, even after an out-of-memory error, and the random number generators are restored.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from halfstep.backends.context import RunContext
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.engine.engine import Engine
from halfstep.errors import SettingError
from halfstep.jobs.job import Job
from halfstep.planning.estimator import Estimate
from halfstep.planning.quiet import quietly
from halfstep.planning.trace import StepOptions
from halfstep.planning.workspaces import CUBLAS_BYTES
from halfstep.precision.policy import Policy

__all__ = ["MeasuredStep", "measure_step", "quiet_gpu", "require_gpu", "start_counting"]


@dataclass(frozen=True)
class MeasuredStep:
    """The memory of one step on this machine."""

    batch: int
    peak_bytes: int  # max_memory_allocated, less what was allocated before
    reserved_bytes: int
    device: str

    def error(self, estimate: Estimate) -> float:
        """The relative error of the prediction: 0.01 is 1 % too high."""
        return estimate.peak_bytes / self.peak_bytes - 1


def require_gpu(feature: str) -> torch.device:
    """The GPU to measure on; raises if there is none."""
    if not torch.cuda.is_available():
        raise SettingError(
            f"{feature} runs the step on a GPU, and torch {torch.__version__} sees none here. Omit it: the prediction needs no GPU."
        )
    return torch.device("cuda")


@contextlib.contextmanager
def quiet_gpu() -> Iterator[None]:
    """Free the GPU's memory and restore the random number generators afterwards, whatever happens inside."""
    before = rng_state()
    try:
        yield
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        restore_rng(before)


def start_counting(device: torch.device) -> int:
    """Reset the peak of a GPU; returns the bytes to subtract from it, so that it counts only what is allocated from now on.

    cuBLAS's workspaces are allocated first and not subtracted: they are part of every prediction.
    """
    x = torch.ones(16, 16, device=device, requires_grad=True)
    (x @ x).sum().backward()  # type: ignore[no-untyped-call] # a handle for this thread, and one for autograd's
    del x
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device) - CUBLAS_BYTES


def measure_step(
    job: Job, policy: Policy, batch: int, options: StepOptions | None = None, seed: int = 0
) -> MeasuredStep:
    """Run two steps of `job` on the GPU and measure the second; does not change the job's own objects."""
    device = require_gpu("Measuring a step")
    context = RunContext(device, seed=seed, batch_size=batch)
    with quiet_gpu(), quietly():
        # A separate function, so that its tensors are gone when the cache is emptied.
        return _two_steps(job, policy, context, options or StepOptions())


def _two_steps(job: Job, policy: Policy, context: RunContext, options: StepOptions) -> MeasuredStep:
    device = context.device
    baseline = start_counting(device)
    # A copy: the job may return the same module every time, and the Engine casts it in place.
    model = copy.deepcopy(job.call("model", context)).to(device).train()
    optimizer = job.call("optimizer", context, model=model)
    engine = Engine(
        model,
        optimizer,
        policy,
        max_norm=1.0,
        accumulate=options.accumulate,
        ema=0.999 if options.ema else None,
        recompute=options.recompute,
    )
    try:
        data = job.call("data", context, split="train", epoch=0)
        with job.guard("data"):
            inputs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), next(iter(data)))
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats(device)
            for _ in range(options.accumulate):
                with engine.forward():
                    loss = job.call("loss", context, model=model, batch=inputs, split="train", epoch=0)
                engine.backward(loss)
                del loss
                engine.step()
            torch.cuda.synchronize(device)
        return MeasuredStep(
            context.batch_size,
            torch.cuda.max_memory_allocated(device) - baseline,
            torch.cuda.max_memory_reserved(device),
            torch.cuda.get_device_name(device),
        )
    finally:
        engine.close()
