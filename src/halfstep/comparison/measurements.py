"""What one run produced: its curves, its timings, and the values measured once per run.

`Measurements` is stored as the `measured` event of a run file. `as_dict` and `from_dict` are the only places that know
the stored keys; a value that was not measured is left out of the file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self

__all__ = ["Curves", "Failure", "GradientDifference", "Measurements", "PredictedPeak", "TrialResult", "Validation"]

# Field -> stored key, where they differ.
_KEYS = {"weights_digest": "weights", "batch_digest": "batch", "allocated": "held"}


@dataclass(frozen=True)
class Failure:
    """Why a run ended early: a kind such as "out of memory", and a reason that a user can act on."""

    kind: str
    reason: str


@dataclass(frozen=True)
class GradientDifference:
    """The first gradients compared with those of another run."""

    cosine: float
    relative_error: float
    vanished: int  # elements that are zero here and not there


@dataclass(frozen=True)
class Validation:
    """Means over the validation split."""

    loss: float
    metric: float | None = None  # None: the job has no metric


@dataclass(frozen=True)
class PredictedPeak:
    """The peak memory that `halfstep plan` predicts, in total and by category."""

    peak_bytes: int
    parts: dict[str, int]


@dataclass(frozen=True)
class Measurements:
    """Values measured once per run; None where one was not measured."""

    base_bytes: int | None = None  # resident before the job was built; 0 on a GPU
    weights_digest: str | None = None  # of the initial weights
    batch_digest: str | None = None  # of the first batch
    warmup_seconds: float | None = None
    warmup_steps: int | None = None
    warmup_peak_bytes: int | None = None
    gradients: GradientDifference | None = None  # from fp32's
    eager_gradients: GradientDifference | None = None  # from those of the same precision without compilation
    allocated: dict[str, int] | None = None  # bytes of weights, gradients and optimizer states
    peak_bytes: int | None = None
    samples: float | None = None  # examples in a batch
    validation: Validation | None = None
    validation_cut: int | None = None  # batches after which validation was ended, because the data has no length
    stopped_after: int | None = None  # steps, where that is fewer than requested
    unsurveyed: bool | None = None  # True: stopped before phases and operators were measured
    split: dict[str, float] | None = None  # median seconds of each phase
    split_failed: str | None = None
    census: dict[str, Any] | None = None
    census_failed: str | None = None
    predicted: PredictedPeak | None = None
    truth: dict[str, Any] | None = None  # stored in the header of the run file

    def as_dict(self) -> dict[str, Any]:
        """Plain values under their stored keys, without what was not measured."""
        values: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value is not None and item.name != "truth":
                values[_KEYS.get(item.name, item.name)] = _plain(value)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any], truth: dict[str, Any] | None = None) -> Self:
        """The measurements that `as_dict` wrote; unknown keys are ignored."""
        types = {
            "gradients": GradientDifference,
            "eager_gradients": GradientDifference,
            "validation": Validation,
            "predicted": PredictedPeak,
        }
        fields: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            value = values.get(_KEYS.get(item.name, item.name))
            if value is not None:
                fields[item.name] = types[item.name](**value) if item.name in types else value
        return cls(**{**fields, "truth": truth})


@dataclass(frozen=True)
class Curves:
    """One value per training step."""

    loss: tuple[float, ...] = ()
    grad_norm: tuple[float | None, ...] = ()
    scale: tuple[float | None, ...] = ()
    skipped: tuple[bool, ...] = ()


@dataclass(frozen=True)
class TrialResult:
    """Everything a run produced, as far as it got."""

    curves: Curves = field(default_factory=Curves)
    seconds: tuple[float, ...] = ()  # of every timed step
    slices: tuple[int, ...] = ()  # steps in each turn
    measurements: Measurements = field(default_factory=Measurements)


def _plain(value: Any) -> Any:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return {key: item for key, item in dataclasses.asdict(value).items() if item is not None}
