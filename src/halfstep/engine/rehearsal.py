"""Compiling the step's kernels while torch.compile compiles the model.

Triton compiles a kernel when it is first launched, and builds a launcher for it with the C compiler: two to three seconds
for those of a step. Half of that is waiting for other processes, so a thread can do it while the first forward is compiled.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch

from halfstep.engine.setup import PreparedRun
from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.gradstats import sums_of_squares
from halfstep.kernels.scale_update import new_counters, scale_update
from halfstep.optim.fused import FusedOptimizer
from halfstep.scaling.scaler import Scaler

__all__ = ["start_rehearsal"]


def start_rehearsal(run: PreparedRun, scaler: Scaler, max_norm: float | None) -> Callable[[], None]:
    """Start to compile the kernels of a run's step; call what this returns before the first step."""
    fused = [optimizer for optimizer in run.optimizers if isinstance(optimizer, FusedOptimizer)]
    if run.device.type != "cuda" or not fused or not triton_runs_on(run.device):
        return _nothing

    def rehearse() -> None:
        # What fails here fails again in the step, in the caller's thread.
        stream = torch.cuda.Stream(run.device)  # type: ignore[no-untyped-call]
        with contextlib.suppress(Exception), torch.cuda.device(run.device), torch.cuda.stream(stream):
            for optimizer in fused:
                optimizer.compile_kernels()
            _compile_norm(run, max_norm)
            zero, one = torch.zeros((), device=run.device), torch.ones((), device=run.device)
            scale_update(one, new_counters(scaler.settings).to(run.device), zero, scaler.settings)

    thread = threading.Thread(target=rehearse, name="halfstep-kernels")
    thread.start()
    return thread.join


def _compile_norm(run: PreparedRun, max_norm: float | None) -> None:
    """Run the kernels that compute and judge the gradients' norm, on one zero of each dtype."""
    from halfstep.kernels.gradstats_triton import judge

    one = torch.ones((), device=run.device)
    for dtype in {getattr(p, "grad_dtype", None) or p.dtype for p in run.params.values()}:
        grads = [torch.zeros(1, dtype=dtype, device=run.device)]
        sums = sums_of_squares(grads, {})
        if sums is not None:
            judge(sums, one, max_norm)


def _nothing() -> None:
    pass
