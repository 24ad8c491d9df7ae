"""The two blocks that the user's code runs in: training forwards and validation, in the policy's precision."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch

from halfstep.backends.base import Backend
from halfstep.engine.buffers import BufferGuard
from halfstep.engine.ema import Ema
from halfstep.engine.graph import LossObserver
from halfstep.engine.guards import GradientGuard
from halfstep.engine.region import compute_region
from halfstep.engine.replay.record import Replays
from halfstep.engine.setup import PreparedRun
from halfstep.errors import SettingError

__all__ = ["Blocks"]


class Blocks:
    """Enters and leaves the blocks; `depth` is above 0 inside one."""

    def __init__(
        self,
        run: PreparedRun,
        backend: Backend,
        buffers: BufferGuard,
        gradients: GradientGuard,
        losses: LossObserver,
        ema: Ema | None,
        replays: Replays,
    ) -> None:
        self._run, self._backend, self._buffers, self._gradients, self._ema = run, backend, buffers, gradients, ema
        self._losses, self._replays = losses, replays
        self.depth = 0
        self.entered = False  # whether a training forward was entered since the Engine last set this to False

    @contextlib.contextmanager
    def forward(self, *, last: bool) -> Iterator[None]:
        """Training: buffers are saved for a skip, gradients set aside; `last` if this micro-batch fills its window."""
        self._buffers.save()
        self.entered = True
        region = self._region(self._losses.observed)
        with self._replays.recorded(), self._backend.forward_context(last=last), self._gradients.set_aside(), region:
            yield

    @contextlib.contextmanager
    def evaluate(self, *, ema: bool) -> Iterator[None]:
        """Validation: eval mode, no gradients; with `ema` on the EMA weights."""
        if ema and self._ema is None:
            raise SettingError("evaluate(ema=True) needs Engine(ema=DECAY); this engine has no EMA.")
        training = [m for m in self._run.module.modules() if m.training]
        swap = contextlib.nullcontext if self._ema is None else self._ema.swapped if ema else self._ema.swapped_back
        self._run.module.eval()
        self._backend.drop_copies()
        try:
            with swap(), self._gradients.set_aside(), torch.no_grad(), self._region():
                yield
        finally:
            self._backend.drop_copies()
            for module in training:
                module.training = True

    @contextlib.contextmanager
    def _region(self, observed: Counter[str] | None = None) -> Iterator[None]:
        self.depth += 1
        try:
            policy = self._run.policy
            with compute_region(self._run.device.type, policy.compute, lean=policy.is_lean, observed=observed):
                yield
        finally:
            self.depth -= 1
