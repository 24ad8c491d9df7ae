"""One training step, whoever does it: the few calls that a comparison makes on Halfstep and on its peers alike.

A loop owns model, optimizer and scheduler. Nothing it does in a step reads a value back from the device: what a step
decided is a function to be called when the run is over, so that measuring costs no wait.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from halfstep.backends.context import RunContext
from halfstep.comparison.contender import Contender
from halfstep.engine.engine import Engine
from halfstep.jobs.job import Job

__all__ = ["EngineLoop", "Loop", "Outcome", "Parts", "build_parts", "make_loop"]


@dataclass(frozen=True)
class Outcome:
    """What one step did."""

    grad_norm: float | None  # of the true gradients, before clipping; None where the loop does not take it
    scale: float | None
    skipped: bool


@dataclass(frozen=True)
class Parts:
    """What a job builds for one run."""

    model: nn.Module
    optimizer: Any
    scheduler: Any


class Loop(Protocol):
    """The calls a comparison makes."""

    model: nn.Module

    def forward(self) -> AbstractContextManager[Any]:
        """A block that computes in the loop's precision."""

    def evaluate(self) -> AbstractContextManager[Any]:
        """A block for validation: the same precision, eval mode, no gradients."""

    def backward(self, loss: Tensor) -> None:
        """Backpropagate."""

    def step(self) -> Callable[[], Outcome]:
        """Update; the outcome is there when it is asked for."""

    def divisor(self) -> float:
        """What the gradients are multiplied with between backward and step."""

    def state_tensors(self) -> list[Tensor]:
        """What the optimizer holds."""

    def truth(self) -> dict[str, Any]:
        """The truth table, as plain values."""

    def end_schedule(self) -> None:
        """Training is over: further steps leave the scheduler alone, which may be at the end of its plan."""

    def close(self) -> None:
        """Undo what was set up."""


def build_parts(job: Job, run: RunContext) -> Parts:
    """Model, optimizer and scheduler of a job on the run's device."""
    model = job.call("model", run).to(run.device)
    optimizer = job.call("optimizer", run, model=model)
    return Parts(model, optimizer, job.call("scheduler", run, optimizer=optimizer, model=model))


def make_loop(contender: Contender, parts: Parts, max_norm: float | None) -> Loop:
    """The loop that a row asks for."""
    if contender.peer is None:
        return EngineLoop(contender, parts, max_norm)
    peers = importlib.import_module("halfstep.comparison.peers")  # what a peer imports is none of Halfstep's business
    loop: Loop = peers.make_peer(contender, parts, max_norm)
    return loop


class EngineLoop:
    """Halfstep's own."""

    def __init__(self, contender: Contender, parts: Parts, max_norm: float | None) -> None:
        self.model = parts.model
        self.engine = Engine(
            parts.model,
            parts.optimizer,
            contender.policy,
            max_norm=max_norm,
            scheduler=parts.scheduler,
            compile=contender.compile,
        )

    def forward(self) -> AbstractContextManager[Any]:
        """The engine's region."""
        return self.engine.forward()

    def evaluate(self) -> AbstractContextManager[Any]:
        """The engine's validation."""
        return self.engine.evaluate()

    def backward(self, loss: Tensor) -> None:
        """Scaled."""
        self.engine.backward(loss)

    def step(self) -> Callable[[], Outcome]:
        """The engine's step; its result is read later."""
        result = self.engine.step()
        return lambda: Outcome(result.grad_norm, result.scale, result.skipped)

    def divisor(self) -> float:
        """The loss scale."""
        return float(self.engine.scaler.get_scale())

    def state_tensors(self) -> list[Tensor]:
        """Moments and masters."""
        return [
            t for o in self.engine.optimizers for s in o.state.values() for t in s.values() if isinstance(t, Tensor)
        ]

    def truth(self) -> dict[str, Any]:
        """The engine's table."""
        return self.engine.truth().as_dict()

    def end_schedule(self) -> None:
        """Without schedulers from here on."""
        self.engine.schedulers = []

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()
