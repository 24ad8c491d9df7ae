"""Why steps of a run were skipped, for the steps that are not timed.

A comparison knows of each training step whether it was skipped and whether its loss was finite, no more: anything else would
cost time in the steps that it measures. So only the steps of the warm-up, and the one that is sampled after training, can be computed
again (`watching.replay`), which distinguishes an overflow of the forward pass, an overflow of the backward pass at this loss
scale, bad data and bad weights.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from halfstep.comparison.measurements import SkipCause
from halfstep.engine.result import StepResult
from halfstep.watching.autopsy import Autopsy
from halfstep.watching.replay import examine

__all__ = ["SkipExaminer"]

_MOST = 3  # skipped steps that are examined; each costs about three steps


class SkipExaminer:
    """A watch of the Engine that examines skipped steps while it is switched on."""

    replay = True  # the Engine records what a replay needs

    def __init__(self) -> None:
        self._engine: Any = None
        self._num_examined = 0
        self.causes: list[SkipCause] = []
        self.seconds = 0.0  # spent on them
        self.look: Callable[[Mapping[str, Tensor], Tensor], None] | None = None  # called once, before the next update

    def attach(self, engine: Any) -> None:
        """Called by the Engine."""
        self._engine = weakref.proxy(engine)
        self.switch(on=False)

    def switch(self, *, on: bool) -> None:
        """Examine the steps that follow, or let them run as without an examiner."""
        self._engine.replays.active, self._num_examined = on, 0
        self._engine.replays.take(sys.maxsize)  # lets go of the batches

    def before_step(self, gradients: Mapping[str, Tensor], divisor: Tensor) -> None:
        """Called by the Engine before each update."""
        look, self.look = self.look, None
        if look is not None:
            look(gradients, divisor)

    def delivered(self, result: StepResult) -> None:
        """Called by the Engine when the outcome of a step has arrived."""
        if not self._engine.replays.active:
            return
        if not result.skipped or self._num_examined >= _MOST or not self._engine.replays.is_due_here:
            self._engine.replays.take(result.step)
            return
        self._num_examined += 1
        autopsy = examine(self._engine.replays, result.step, result.scale or 1.0, self._engine.hardware)
        self.seconds += autopsy.seconds
        if autopsy.replayed:
            self.causes.append(_cause(autopsy))


def _cause(autopsy: Autopsy) -> SkipCause:
    return SkipCause(
        autopsy.step,
        autopsy.cause,
        autopsy.module,
        autopsy.sentence,
        autopsy.scale,
        autopsy.at_scale_1 is True,
        autopsy.rank,
    )
