"""What one run produced: its curves, its timings, its samples, and the values measured once per run.

`Measurements` is stored as the `measured` event of a run file. `as_dict` and `from_dict` are the only places that know
the stored keys; a value that was not measured is left out of the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from halfstep.watching.sample import Sample

__all__ = [
    "LOST",
    "Curves",
    "Failure",
    "GradientDifference",
    "Measurements",
    "Numerics",
    "PredictedPeak",
    "SkipCause",
    "TrialResult",
    "Validation",
]

LOST = "ranks"  # the kind of a failure whose cause is another rank
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
    seconds: float | None = None  # of all batches together, data included; None in files of earlier versions
    samples: int | None = None  # examples, of all ranks


@dataclass(frozen=True)
class PredictedPeak:
    """The peak memory that `halfstep plan` predicts, in total and by category."""

    peak_bytes: int
    parts: dict[str, int]
    gpu: str | None = None  # the GPU that it is predicted for; None: the one that the run measured


@dataclass(frozen=True)
class Numerics:
    """What the format did to the gradients of one step after training."""

    step: int  # counted from the start of training
    scale: float  # of the loss
    underflow: float | None = None  # share of the elements that are not 0 in fp32 and are 0 as stored here
    worst_layer: str | None = (
        None  # the module with the largest share, or the first that overflowed; None if there is none
    )
    worst_underflow: float | None = None  # its share
    overflowed: str | None = (
        None  # if gradients are not finite: the cause as in SkipCause, or what of that module is not ("output", "gradient")
    )


@dataclass(frozen=True)
class SkipCause:
    """Why a step was skipped, from computing it again."""

    step: int
    cause: str  # data, weights, forward, backward or not reproduced, as in `watching.autopsy`
    module: str | None  # "" is the model itself, None outside of it
    sentence: str
    scale: float  # of the loss
    scale_too_high: bool = False  # whether the gradients are finite without loss scaling
    rank: int | None = None  # on which it was computed again; None with one process


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
    peak_bytes: int | None = None  # on several ranks, of the largest; base_bytes and allocated are of the same rank
    rank_peaks: tuple[int, ...] | None = None  # of each rank, where there are several
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
    numerics: Numerics | None = None
    numerics_failed: str | None = None
    skip_causes: tuple[SkipCause, ...] | None = None  # of skipped steps that were computed again
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
        types: dict[str, Callable[..., Any]] = {
            "gradients": GradientDifference,
            "eager_gradients": GradientDifference,
            "validation": Validation,
            "predicted": PredictedPeak,
            "numerics": Numerics,
            "rank_peaks": lambda *peaks: peaks,
            "skip_causes": lambda *causes: tuple(SkipCause(**{"module": None, **cause}) for cause in causes),
        }
        fields: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            value = values.get(_KEYS.get(item.name, item.name))
            if value is not None:
                build = types.get(item.name)
                fields[item.name] = (
                    value if build is None else build(*value) if isinstance(value, list) else build(**value)
                )
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
    sample: Sample | None = None  # behind `Measurements.numerics`


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return {key: item for key, item in dataclasses.asdict(value).items() if item is not None}
