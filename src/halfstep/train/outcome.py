"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["TrainOutcome"]


@dataclass(frozen=True)
class TrainOutcome:
    """How a run ended."""

    out: Path
    precision: str
    steps: int
    epochs: int
    skips: int
    loss: float | None  # of the last training step
    validation: dict[str, float]
    checkpoint: Path | None
    stopped_by: str | None  # the name of the signal that stopped the run
    problem: str | None = None  # why the run did not train although it reached its end
    numerics: tuple[str, ...] = ()  # what the Watch reports, a line each
