"""Autopsies in a loop that Halfstep does not own: `Watch.record` takes the place of the Engine's forward block.

    for x, y in loader:
        compute = functools.partial(loss_of, model, x, y)
        watch.record(compute)
        scaler.scale(compute()).backward()
        scaler.step(optimizer)

The function contains what the loop does around a forward: its autocast block, its loss. Everything else is that of the Engine:
the same records, the same replay, the same limits (`watching/skips.py`). Two things are less exact than there. A loop that skips
restores no buffers, so the replay starts from those of today. And on several ranks each one computes its own micro-batches
again, because the loop does not know which of them overflowed; those whose gradients are finite report "not reproduced".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.backends.base import Backend
from halfstep.backends.context import RunContext
from halfstep.engine.buffers import BufferGuard
from halfstep.engine.replay.record import Generators, MicroBatch, Replays
from halfstep.engine.result import StepResult
from halfstep.engine.setup import PreparedRun
from halfstep.precision.loss_scale import LossScale
from halfstep.precision.policy import Policy
from halfstep.scaling.scaler import NoScaler, make_scaler
from halfstep.watching.autopsy import Autopsy
from halfstep.watching.skips import Autopsies

__all__ = ["LoopReplays"]


class _Loop(Backend):
    """A loop of the user's own: one of several ranks examines its own micro-batches."""

    name = "loop"

    @property
    def overflowed_ranks(self) -> tuple[int, ...]:
        """This rank, so that it looks."""
        context = self.context()
        return (context.rank,) if context.world_size > 1 else ()

    @property
    def replay_obstacle(self) -> str | None:
        """None: a replay that would send a message ends before it is sent."""
        return None


class LoopReplays:
    """The micro-batches of a loop's steps, and the autopsies of those that are skipped."""

    hardware = None

    def __init__(
        self, model: nn.Module, params: Mapping[str, Tensor], outlet: Callable[[Autopsy], None], *, has_scale: bool
    ) -> None:
        run = PreparedRun(model, Policy.parse("fp32"), 1, dict(params), (), contextlib.ExitStack())
        self.device, self.backend = run.device, _Loop(_context(run.device))
        scaler = make_scaler(LossScale()) if has_scale else NoScaler()
        self.replays = Replays(run, self.backend, BufferGuard(model), scaler, Autopsies, False, False, model)
        self._autopsies = Autopsies(outlet)
        self._autopsies.attach(self)
        self._window: list[MicroBatch | None] = []
        self.is_replaying = False

    @property
    def autopsies(self) -> list[Autopsy]:
        """The latest ones."""
        return self._autopsies.autopsies

    def record(self, compute_loss: Callable[[], Any], factor: float) -> None:
        """Before a forward: keep the state of the generators and the function; does nothing in a replay."""
        if self.is_replaying:
            return
        self.replays.is_used = True
        module = self.replays.run.module
        self._window.append(MicroBatch(Generators.now(self.device), factor, module.training, compute_loss))

    def end_window(self, step: int) -> None:
        """The micro-batches so far are those of this step."""
        self.replays.file(step, self._window)
        self._window = []

    def delivered(self, step: int, *, skipped: bool, scale: float) -> None:
        """The outcome of a step has arrived."""
        if not self.replays.is_used or (not skipped and not self._autopsies.is_expecting):
            self.replays.take(step)
            return
        result = StepResult(step, boundary=True, lr=0.0)
        result.fill(float(skipped), float("nan"), scale)
        self.is_replaying = True
        try:
            self._autopsies.delivered(result)
        finally:
            self.is_replaying = False


def _context(device: torch.device) -> RunContext:
    if not (dist.is_available() and dist.is_initialized()):
        return RunContext(device)
    return RunContext(device, rank=dist.get_rank(), world_size=dist.get_world_size())
