"""Halfstep's own training loop in a comparison, and the choice between it and the baselines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from halfstep.comparison.baselines import make_baseline
from halfstep.comparison.measurements import SkipCause
from halfstep.comparison.numerics.examiner import SkipExaminer
from halfstep.comparison.training_loop import Parts, StepOutcome, TrainingLoop
from halfstep.comparison.variant import Variant
from halfstep.engine.engine import Engine

__all__ = ["EngineLoop", "make_loop"]


def make_loop(variant: Variant, parts: Parts, max_norm: float | None) -> TrainingLoop:
    """The training loop of a row."""
    if variant.baseline is None:
        return EngineLoop(variant, parts, max_norm)
    return make_baseline(variant, parts, max_norm)


class EngineLoop:
    """A loop around `halfstep.Engine`."""

    def __init__(self, variant: Variant, parts: Parts, max_norm: float | None) -> None:
        self.model = parts.model
        self._examiner = SkipExaminer()
        self.engine = Engine(
            parts.model,
            parts.optimizer,
            variant.policy,
            max_norm=max_norm,
            scheduler=parts.scheduler,
            compile=variant.compile,
            watch=self._examiner,
        )

    def forward(self) -> AbstractContextManager[Any]:
        """The engine's forward region."""
        return self.engine.forward()

    def evaluate(self) -> AbstractContextManager[Any]:
        """The engine's validation region."""
        return self.engine.evaluate()

    def backward(self, loss: Tensor) -> None:
        """Backpropagate the scaled loss."""
        self.engine.backward(loss)

    def step(self, replay: Callable[[], Any] | None = None) -> Callable[[], StepOutcome]:
        """Step the engine; its result is read later."""
        result = self.engine.step(replay=replay)
        return lambda: StepOutcome(result.grad_norm, result.scale, result.skipped)

    def examine_skips(self, *, on: bool) -> None:
        """Examine the steps that follow."""
        self._examiner.switch(on=on)

    def skip_causes(self) -> tuple[SkipCause, ...]:
        """What the examiner has found."""
        return tuple(self._examiner.causes)

    def examining_seconds(self) -> float:
        """The time it took."""
        return self._examiner.seconds

    def divisor(self) -> float:
        """The loss scale."""
        return float(self.engine.scaler.get_scale())

    def state_tensors(self) -> list[Tensor]:
        """Moments and masters."""
        return [
            t for o in self.engine.optimizers for s in o.state.values() for t in s.values() if isinstance(t, Tensor)
        ]

    def truth(self) -> dict[str, Any]:
        """The engine's truth table."""
        return self.engine.truth().as_dict()

    def end_schedule(self) -> None:
        """Remove the schedulers."""
        self.engine.schedulers.clear()

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()
