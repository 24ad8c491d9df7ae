"""A run as `halfstep watch` shows it: losses, loss scale, skips, events, and the last sample of its numbers.

Everything is read from the run file, so a run in progress looks as it will look later up to its last line. A sample is an
event `numerics`: for each tensor how many elements are NaN, inf or zero, and how many there are of each exponent. Shares that
a format would flush to zero are computed here from the exponents, for the format that the run computes in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from halfstep.precision.formats import FP32, Format, get_format

if TYPE_CHECKING:
    from halfstep.checkpoint.runlog import Run

__all__ = [
    "KINDS",
    "NUMERICS",
    "EventLine",
    "RunView",
    "StepPoint",
    "TensorRow",
    "format_of",
    "rows_of",
    "view_of",
    "worst",
]

NUMERICS = "numerics"  # the event of a sample
_ENDS = {"ended", "measured", "failed"}  # the last events of a run, the latter two in a comparison
_QUIET = {"truth", "saved", "validation", "memory", "ended", "measured", NUMERICS}  # events that report no problem
KINDS = ("gradient", "weight", "activation")


@dataclass(frozen=True)
class StepPoint:
    """One step of a run."""

    step: int
    loss: float
    scale: float
    skipped: bool
    rate: float  # samples per second


@dataclass(frozen=True)
class EventLine:
    """Something that a run reported."""

    step: int | None
    kind: str
    text: str
    advice: str


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a sample."""

    name: str
    kind: str  # "gradient", "weight" or "activation"
    numel: int
    nonfinite: int
    zeros: float  # share of all elements
    flushed: float  # share of the non-zero elements that the format would make zero
    subnormal: float  # share of them that it would represent with fewer bits
    largest: float
    ratio: float | None = None  # of an update's norm to the weight's
    lost: float | None = None  # share of updates that rounding removed
    bins: Mapping[int, int] = field(default_factory=dict)  # elements by exponent


@dataclass(frozen=True)
class RunView:
    """What a run file shows."""

    run: str
    policy: str
    format: str  # that it computes in
    command: str
    points: tuple[StepPoint, ...]
    events: tuple[EventLine, ...]
    rows: tuple[TensorRow, ...]
    sampled_at: int | None
    total_steps: int | None
    ended: bool
    last_time: float = 0.0  # of the last record, in seconds since 1970

    def state(self, now: float) -> str:
        """Whether the run has ended, or when it was last heard of."""
        if self.ended:
            return "ended"
        age = max(0, round(now - self.last_time))
        return f"last record {age} s ago" if age < 600 else f"last record {age // 60} min ago: stopped?"

    @property
    def skips(self) -> int:
        """Steps that changed nothing."""
        return sum(point.skipped for point in self.points)


def view_of(run: Run) -> RunView:
    """The view of a run file."""
    policy = str(run.header.get("policy", ""))
    fmt = _compute_format(policy)
    samples = [event for event in run.events if event["event"] == NUMERICS]
    command = run.header.get("command", "")
    ends = [event for event in run.events if event["event"] in _ENDS]
    last_resume = run.resumes[-1]["time"] if run.resumes else 0.0
    return RunView(
        run=str(run.header["run"]),
        policy=policy,
        format=fmt.name,
        command=command if isinstance(command, str) else " ".join(map(str, command)),
        points=tuple(_point(record) for record in run.records),
        events=tuple(_event(event) for event in run.events if event["event"] not in _QUIET),
        rows=tuple(rows_of(samples[-1], fmt)) if samples else (),
        sampled_at=samples[-1].get("step", samples[-1].get("attempted")) if samples else None,
        total_steps=(run.header.get("config") or {}).get("steps"),
        ended=bool(ends) and ends[-1]["time"] >= last_resume,
        last_time=max(
            record["time"] for record in (run.header, *run.records[-1:], *run.events[-1:], *run.resumes[-1:])
        ),
    )


def worst(rows: Iterable[TensorRow], count: int) -> list[TensorRow]:
    """The rows to look at first: elements that are not finite, then lost updates, then what underflows."""

    def badness(row: TensorRow) -> tuple[float, ...]:
        return (row.nonfinite / max(row.numel, 1), row.lost or 0.0, row.flushed, row.subnormal, row.zeros)

    return sorted(rows, key=badness, reverse=True)[:count]


def format_of(name: str) -> Format:
    """The format with this name; fp32 for one whose range is not known."""
    fmt = get_format(name)
    return fmt if isinstance(fmt, Format) else FP32


def _compute_format(policy: str) -> Format:
    from halfstep.errors import SettingError
    from halfstep.precision.policy import Policy

    try:
        return format_of(Policy.parse(policy).compute)
    except SettingError:  # a policy of a later version
        return FP32


def _point(record: Mapping[str, Any]) -> StepPoint:
    def number(name: str, default: float) -> float:
        value = record.get(name)
        return float(value) if isinstance(value, int | float) else default

    return StepPoint(
        int(record["attempted"]),
        number("loss", math.nan),
        number("scale", 1.0),
        bool(record.get("skipped")),
        number("samples_per_second", math.nan),
    )


def _event(event: Mapping[str, Any]) -> EventLine:
    step = event.get("step", event.get("attempted"))
    text = str(event.get("text") or event.get("message") or "")
    if not text:
        own = {
            k: v
            for k, v in event.items()
            if k not in {"kind", "time", "event", "step", "micro_batch", "attempted", "applied", "advice"}
        }
        text = ", ".join(f"{name}={value}" for name, value in own.items())
    return EventLine(step, str(event["event"]), text, str(event.get("advice", "")))


def rows_of(sample: Mapping[str, Any], fmt: Format) -> Iterable[TensorRow]:
    """The tensors of a sample, as shown for a format."""
    updates = sample.get("updates") or {}
    for kind in KINDS:
        for name, stats in (sample.get(f"{kind}s") or {}).items():
            bins = {int(exponent): int(count) for exponent, count in (stats.get("exponents") or {}).items()}
            update = updates.get(name, {}) if kind == "weight" else {}
            yield TensorRow(
                name,
                kind,
                numel=int(stats["numel"]),
                nonfinite=int(stats.get("nan", 0)) + int(stats.get("inf", 0)),
                zeros=int(stats.get("zeros", 0)) / max(int(stats["numel"]), 1),
                flushed=_share_below(bins, math.log2(fmt.smallest_subnormal) - 1),
                subnormal=_share_below(bins, math.log2(fmt.smallest_normal))
                - _share_below(bins, math.log2(fmt.smallest_subnormal) - 1),
                largest=float(stats.get("largest", 0.0)),
                ratio=update.get("ratio"),
                lost=update.get("lost"),
                bins=bins,
            )


def _share_below(bins: Mapping[int, int], exponent: float) -> float:
    """The share of elements whose exponent is below this one."""
    total = sum(bins.values())
    return sum(count for e, count in bins.items() if e < exponent) / total if total else 0.0
