"""What a child process is told, as a value that travels through a JSON file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.comparison.contender import Contender
from halfstep.comparison.settings import CompareSettings

__all__ = ["ChildSpec", "TrialSpec"]


@dataclass(frozen=True)
class TrialSpec:
    """What one run is."""

    contender: Contender
    settings: CompareSettings
    seed: int
    batch: int
    survey: bool  # whether to split the time and take the census; once per row is enough
    gradients: Path | None = None  # where the reference's first gradients are, or are to be written
    is_reference: bool = False


@dataclass(frozen=True)
class ChildSpec:
    """Everything a child is told: the target, and for a run the row, the seed and where to write; plain values only."""

    target: str | None
    data_dir: str | None
    settings: dict[str, Any]
    contender: dict[str, Any] | None = None  # None: a survey
    repeat: int = 0
    seed: int = 0
    batch: int = 0
    survey: bool = False
    gradients: str | None = None
    is_reference: bool = False
    out: str = ""
    command: tuple[str, ...] = ()

    def trial(self) -> TrialSpec:
        """The part of it that a Trial needs."""
        assert self.contender is not None
        return TrialSpec(
            Contender.from_dict(self.contender),
            CompareSettings.from_dict(self.settings),
            self.seed,
            self.batch,
            self.survey,
            None if self.gradients is None else Path(self.gradients),
            self.is_reference,
        )
