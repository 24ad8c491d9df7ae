"""Messages between a comparison and its child processes: what to run, requests and answers.

They travel as JSON; `as_dict` and `from_dict` are the only conversions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from halfstep.comparison.measurements import Failure
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.survey import Survey
from halfstep.comparison.variant import Variant

__all__ = ["Answer", "ChildSpec", "Request", "TrialSpec"]


@dataclass(frozen=True)
class TrialSpec:
    """One run: a row, its settings and its seed."""

    variant: Variant
    settings: CompareSettings
    seed: int
    batch: int
    survey: bool  # whether to time the phases and take the census; once per row is enough
    gradients: Path | None = None  # the file of the reference's first gradients, which the reference writes
    is_reference: bool = False
    repeat: int = 0
    eager_gradients: Path | None = None  # those of this precision without compilation, which that row writes

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        values["contender"] = values.pop("variant").as_dict()
        values["settings"] = self.settings.as_dict()
        for name in ("gradients", "eager_gradients"):
            values[name] = None if values[name] is None else str(values[name])
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The spec that `as_dict` wrote."""
        gradients, eager = (
            None if (path := values[name]) is None else Path(path) for name in ("gradients", "eager_gradients")
        )
        return cls(
            Variant.from_dict(values["contender"]),
            CompareSettings.from_dict(values["settings"]),
            values["seed"],
            values["batch"],
            values["survey"],
            gradients,
            values["is_reference"],
            values["repeat"],
            eager,
        )


@dataclass(frozen=True)
class ChildSpec:
    """Everything a child process needs: the target, and for a run the trial and the file to write."""

    target: str | None
    data_dir: str | None
    settings: CompareSettings
    trial: TrialSpec | None = None  # None: a preflight
    out: str = ""
    command: tuple[str, ...] = ()  # of the comparison, for the run file

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "target": self.target,
            "data_dir": self.data_dir,
            "settings": self.settings.as_dict(),
            "trial": None if self.trial is None else self.trial.as_dict(),
            "out": self.out,
            "command": list(self.command),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The spec that `as_dict` wrote."""
        trial = values["trial"]
        return cls(
            values["target"],
            values["data_dir"],
            CompareSettings.from_dict(values["settings"]),
            None if trial is None else TrialSpec.from_dict(trial),
            values["out"],
            tuple(values["command"]),
        )


@dataclass(frozen=True)
class Request:
    """What a child is asked to do; see `halfstep.comparison.child` for the list."""

    do: str
    count: int = 0  # steps, for a slice

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"do": self.do} | ({"count": self.count} if self.count else {})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The request that `as_dict` wrote."""
        return cls(values["do"], values.get("count", 0))


@dataclass(frozen=True)
class Answer:
    """The reply of a child: done, with a survey if one was requested, or a failure."""

    failure: Failure | None = None
    survey: Survey | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        if self.failure is not None:
            return {"is": "failed", "kind": self.failure.kind, "reason": self.failure.reason}
        return {"is": "done"} | ({} if self.survey is None else {"survey": self.survey.as_dict()})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The answer that `as_dict` wrote."""
        if values["is"] == "failed":
            return cls(Failure(values["kind"], values["reason"]))
        survey = values.get("survey")
        return cls(survey=None if survey is None else Survey.from_dict(survey))
