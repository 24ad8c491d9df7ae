"""Halfstep's own training loop in a comparison, and the choice between it and the baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from halfstep.backends.base import Backend
from halfstep.comparison.baselines import make_baseline
from halfstep.comparison.measurements import SkipCause
from halfstep.comparison.numerics.examiner import SkipExaminer
from halfstep.comparison.training_loop import Parts, StepOutcome, TrainingLoop
from halfstep.comparison.variant import Variant
from halfstep.engine.engine import Engine
from halfstep.optim.shards import is_sharded, placed_as

__all__ = ["EngineLoop", "make_loop"]


def make_loop(
    variant: Variant, parts: Parts, max_norm: float | None, backend: Backend | str = "single"
) -> TrainingLoop:
    """The training loop of a row; `backend` is the Engine's."""
    if variant.baseline is None:
        return EngineLoop(variant, parts, max_norm, backend)
    return make_baseline(variant, parts, max_norm, wraps=backend != "single")


class EngineLoop:
    """A loop around `halfstep.Engine`."""

    def __init__(
        self, variant: Variant, parts: Parts, max_norm: float | None, backend: Backend | str = "single"
    ) -> None:
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
            backend=backend,
        )

    def forward(self) -> AbstractContextManager[Any]:
        """The engine's forward region."""
        return self.engine.forward()

    def evaluate(self) -> AbstractContextManager[Any]:
        """The engine's validation region."""
        return self.engine.evaluate()

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Backpropagate the scaled loss."""
        self.engine.backward(loss, weight)

    def step(self, replay: Callable[[], Any] | None = None) -> Callable[[], StepOutcome]:
        """Step the engine; its result is read later."""
        result = self.engine.step(replay=replay)
        return lambda: StepOutcome(result.grad_norm, result.scale, result.skipped)

    def look_at_gradients(
        self, named: list[tuple[str, Tensor]], look: Callable[[list[tuple[str, Tensor]], float], None]
    ) -> None:
        """Look before the engine's next update: ranks may reduce their gradients only then."""
        params = dict(named)

        def receive(gradients: Mapping[str, Tensor], divisor: Tensor) -> None:
            placed = [
                (name, placed_as(params[name], grad) if is_sharded(params[name]) else grad)
                for name, grad in gradients.items()
                if name in params
            ]
            look(placed, float(divisor))

        self._examiner.look = receive

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
