"""The survey of a comparison: the machine, the job, and how the comparison was run.

`preflight` measures the first part in a child process and the runner adds the rest. It is stored as `survey.json`;
`as_dict` and `from_dict` are the only places that know the stored keys. Nothing here needs torch, so that a report can
be rebuilt without it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.variant import Variant
from halfstep.errors import SettingError

__all__ = ["SURVEY", "Survey", "read_json", "read_survey", "write_survey"]

SURVEY = "survey.json"  # in the directory of a comparison
_OPTIONAL = ("threads", "resident_bytes", "has_metric", "flops_per_step")


@dataclass(frozen=True)
class Survey:
    """Machine and job, measured before anything is compared, and the rows and settings of the comparison."""

    target: str
    source: str  # the target in a form that loads it from any directory
    data_dir: str | None
    batch: int
    device: str
    machine: str
    support: dict[str, tuple[str, str]]  # format -> (native, slow or emulated; the reason)
    environment: dict[str, Any]
    matmul: tuple[dict[str, Any], ...]  # the matmul rate of each format, as halfstep.hardware.measure reports it
    notes: tuple[str, ...]
    same_weights: bool  # the same seed gives the same initial weights
    same_batches: bool  # and the same first batch
    num_params: int
    samples: int | None  # examples in the first batch
    threads: int | None = None  # of torch on a CPU
    resident_bytes: int = 0
    has_metric: bool = False
    flops_per_step: int | None = None
    # Set by the runner.
    settings: CompareSettings = dataclasses.field(default_factory=CompareSettings)
    variants: tuple[Variant, ...] = ()
    reference: str = ""  # the label of the row that the others are compared with
    command: tuple[str, ...] = ()
    side_by_side: bool = False  # all rows of a round are alive at once and take turns
    stopped: bool = True  # until the last run is done, so that a comparison that was killed counts as stopped too

    @property
    def is_comparable(self) -> bool:
        """Whether losses and gradients of two rows with the same seed can be compared."""
        return self.same_weights and self.same_batches

    @property
    def place(self) -> str:
        """The machine, and the ranks where there are several."""
        ranks = f", {self.settings.ranks} ranks ({self.settings.strategy})" if self.settings.ranks > 1 else ""
        return f"{self.machine}{ranks}"

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the rows, in order."""
        return tuple(variant.label for variant in self.variants)

    def support_for(self, form: str) -> tuple[str, str]:
        """How the hardware supports a format, and the reason."""
        return self.support.get(form, ("native", ""))

    def matmul_rate(self, form: str) -> float | None:
        """Floating-point operations per second of large matrix products in a format, if measured."""
        return next((m["gflops_median"] * 1e9 for m in self.matmul if m["format"] == form), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values under their stored keys."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        variants = values.pop("variants")
        return {
            **values,
            "support": {form: list(level) for form, level in self.support.items()},
            "matmul": list(self.matmul),
            "notes": list(self.notes),
            "settings": self.settings.as_dict(),
            "contenders": [variant.as_dict() for variant in variants],
            "command": list(self.command),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The survey that `as_dict` wrote; a missing key is a KeyError with the names of all missing ones."""
        names = ["contenders" if item.name == "variants" else item.name for item in dataclasses.fields(cls)]
        missing = [name for name in names if name not in values and name not in _OPTIONAL]
        if missing:
            raise KeyError(", ".join(missing))
        fields = {name: values[name] for name in names if name in values}
        variants = tuple(Variant.from_dict(item) for item in fields.pop("contenders"))
        return cls(
            **{
                **fields,
                "support": {form: (level, why) for form, (level, why) in values["support"].items()},
                "matmul": tuple(values["matmul"]),
                "notes": tuple(values["notes"]),
                "settings": CompareSettings.from_dict(values["settings"]),
                "variants": variants,
                "command": tuple(values["command"]),
            }
        )


def read_survey(folder: Path) -> Survey:
    """The survey of a comparison's directory."""
    path = folder / SURVEY
    try:
        return Survey.from_dict(read_json(path))
    except KeyError as error:
        raise SettingError(
            f"{path} lacks {error.args[0]}; it is damaged, or was not written by this version of halfstep compare."
        ) from error
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(
            f"{path} is damaged ({type(error).__name__}: {error}); run the comparison again, or restore the file."
        ) from error


def write_survey(folder: Path, survey: Survey) -> None:
    """Write the survey into a comparison's directory."""
    (folder / SURVEY).write_text(json.dumps(survey.as_dict(), indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a comparison's directory."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror or error}. Check the path.") from error
    except ValueError as error:
        raise SettingError(f"{path} is not JSON ({error}); it was not written by halfstep compare.") from error
    if not isinstance(value, dict):
        raise SettingError(f"{path} does not contain a JSON object; it was not written by halfstep compare.")
    return value
