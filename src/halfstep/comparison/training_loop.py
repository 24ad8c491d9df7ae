"""The training loop of one run, as a comparison sees it: the few calls made on Halfstep and on the baselines alike.

A loop owns model, optimizer and scheduler. Nothing it does in a step reads a value back from the device: the outcome of
a step is a function that is called after the run, so that measuring adds no synchronization.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from halfstep.backends.context import RunContext
from halfstep.comparison.measurements import SkipCause
from halfstep.engine.schedules import needs_metric
from halfstep.jobs.job import Job

__all__ = ["Parts", "StepOutcome", "TrainingLoop", "build_parts"]


@dataclass(frozen=True)
class StepOutcome:
    """The result of one optimizer step."""

    grad_norm: float | None  # of the unscaled gradients, before clipping; None where the loop does not compute it
    scale: float | None
    skipped: bool


@dataclass(frozen=True)
class Parts:
    """What a job builds for one run."""

    model: nn.Module
    optimizer: Any
    scheduler: Any


class TrainingLoop(Protocol):
    """The calls a comparison makes."""

    model: nn.Module

    def forward(self) -> AbstractContextManager[Any]:
        """A block that computes in the loop's precision."""

    def evaluate(self) -> AbstractContextManager[Any]:
        """A block for validation: the same precision, eval mode, no gradients."""

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Backpropagate; `weight` is what this rank's batch counts, where ranks have different numbers of examples."""

    def step(self, replay: Callable[[], Any] | None = None) -> Callable[[], StepOutcome]:
        """Update; the returned function reads the outcome. `replay` computes the loss again, for `examine_skips`."""

    def look_at_gradients(
        self, named: list[tuple[str, Tensor]], look: Callable[[list[tuple[str, Tensor]], float], None]
    ) -> None:
        """Call `look` once with the gradients of the next step and what they are multiplied with, after their reduction over ranks.

        Called between backward and step; `named` are the parameters. Sharded gradients are DTensors.
        """

    def examine_skips(self, *, on: bool) -> None:
        """From now on, find out why a step is skipped, or not; a loop that cannot does nothing."""

    def skip_causes(self) -> tuple[SkipCause, ...]:
        """Why steps were skipped, as far as it was examined."""

    def examining_seconds(self) -> float:
        """The time that took."""

    def divisor(self) -> float:
        """The factor that gradients carry between backward and step: the loss scale."""

    def state_tensors(self) -> list[Tensor]:
        """The tensors in the optimizer's state."""

    def truth(self) -> dict[str, Any]:
        """The truth table, as plain values."""

    def end_schedule(self) -> None:
        """Detach the scheduler, which may have reached the end of its schedule; further steps leave it alone."""

    def close(self) -> None:
        """Undo the setup."""


def build_parts(job: Job, run: RunContext) -> Parts:
    """Model, optimizer and scheduler of a job on the run's device.

    A scheduler that is stepped with validation results is left out: a comparison validates once, after training.
    """
    model = job.call("model", run).to(run.device)
    optimizer = job.call("optimizer", run, model=model)
    scheduler = job.call("scheduler", run, optimizer=optimizer, model=model)
    return Parts(model, optimizer, None if scheduler is not None and needs_metric(scheduler) else scheduler)
