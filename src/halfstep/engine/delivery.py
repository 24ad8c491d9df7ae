"""Outcomes of steps on their way from the device to schedulers, hooks and the hard stop.

Whether a step was skipped is known on the device. The next step delivers it to the host before it launches its own update
(`halfstep.scaling.readback`); only then do the schedulers advance, the callbacks run, and a run whose every step
overflows stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halfstep.engine.result import StepResult
from halfstep.engine.schedules import Schedules
from halfstep.engine.steps import Decision
from halfstep.kernels.scale_update import COUNTERS
from halfstep.scaling.readback import Readback
from halfstep.scaling.scaler import Scaler, stop_if_stuck

__all__ = ["Delivery", "Progress"]

_CONSECUTIVE = COUNTERS.index("consecutive_skips")


@dataclass
class Progress:
    """How far a run is."""

    attempts: int = 0  # steps tried, skipped ones included
    micro_batches: int = 0
    applied: int = 0  # updates that happened, as far as they have been delivered


class Delivery:
    """The queue of outcomes, and what each one sets in motion."""

    def __init__(
        self,
        progress: Progress,
        schedules: Schedules,
        scaler: Scaler,
        params: Mapping[str, Tensor],
        callbacks: list[Callable[[StepResult], None]],
        gradients: Callable[[], Mapping[str, Tensor] | None] = lambda: None,
    ) -> None:
        """`gradients` returns those that are not in `param.grad`, where the backend stores them."""
        self._progress, self.schedules, self._scaler = progress, schedules, scaler
        self._params, self._callbacks = params, callbacks
        self._gradients = gradients
        self._readback = Readback()

    def push(self, decision: Decision, scale: Tensor, result: StepResult) -> None:
        """Send the outcome of a step on its way."""
        consecutive = self._scaler.counters[_CONSECUTIVE].to(decision.norm.device, torch.float32)
        self._readback.push(torch.stack((decision.found_inf, decision.norm, scale, consecutive)), result)

    def drain(self) -> None:
        """Wait for every outcome that is on its way and act on it."""
        for result, (found_inf, norm, scale, consecutive) in self._readback.deliver(wait=True):
            result.fill(found_inf, norm, scale)
            if not found_inf:
                self._progress.applied += 1
                self.schedules.advance(self._progress.applied)
            for callback in self._callbacks:
                callback(result)
            stop_if_stuck(int(consecutive), self._scaler.settings, self._scaler.get_scale, self._named())

    def _named(self) -> Iterator[tuple[str, Any]]:
        """The parameters by name, or what has their gradients in `grad`; evaluated only if the run stops."""
        own = self._gradients()
        if own is None:
            yield from self._params.items()
        else:
            yield from ((name, SimpleNamespace(grad=grad)) for name, grad in own.items())

    def discard(self) -> None:
        """Forget the outcomes of a run that another state replaces."""
        self.schedules.forget()
        self._readback = Readback()
