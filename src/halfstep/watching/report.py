"""What a Watch has seen, as a value with a readable table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.precision.formats import BF16, FP16
from halfstep.watching.events import Event
from halfstep.watching.sample import Sample
from halfstep.watching.stats import TensorStats
from halfstep.watching.updates import UpdateStats

__all__ = ["ParameterRow", "WatchReport"]

_MOST_ROWS = 12


@dataclass(frozen=True)
class ParameterRow:
    """One parameter in the last sample."""

    name: str
    gradient: TensorStats | None
    weight: TensorStats | None
    update: UpdateStats | None

    @property
    def badness(self) -> tuple[float, ...]:
        """What the table is sorted by: non-finite elements, lost updates, underflow in fp16."""
        grad, weight, update = self.gradient, self.weight, self.update
        return (
            (grad.nonfinite if grad else 0) + (weight.nonfinite if weight else 0),
            (update.stuck or 0.0) if update and not update.master else 0.0,
            grad.flushed(FP16) if grad else 0.0,
            grad.share_of_zeros if grad else 0.0,
        )


@dataclass(frozen=True)
class WatchReport:
    """The last sample, worst parameters first, and the events of the run."""

    step: int | None
    scale: float | None
    rows: tuple[ParameterRow, ...]
    activations: tuple[TensorStats, ...]  # largest values first
    events: tuple[Event, ...]
    cost: str

    @classmethod
    def of(cls, samples: Sequence[Sample], events: Sequence[Event], cost: str) -> WatchReport:
        """The report of a watch that has these samples and events."""
        if not samples:
            return cls(None, None, (), (), tuple(events), cost)
        last = samples[-1]
        names = dict.fromkeys((*last.gradients, *last.weights, *last.updates))
        rows = [ParameterRow(n, last.gradients.get(n), last.weights.get(n), last.updates.get(n)) for n in names]
        rows.sort(key=lambda row: row.badness, reverse=True)
        activations = sorted(last.activations.values(), key=lambda s: (s.nonfinite, s.largest), reverse=True)
        return cls(last.step, last.scale, tuple(rows), tuple(activations), tuple(events), cost)

    def __str__(self) -> str:
        if self.step is None:
            return "Watch: no sample has arrived yet."
        lines = [f"Watch at step {self.step}, gradients divided by {self.scale:g}; {self.cost}"]
        lines += _table(_HEADER, [_cells(row) for row in self.rows[:_MOST_ROWS]])
        if len(self.rows) > _MOST_ROWS:
            lines.append(f"... and {len(self.rows) - _MOST_ROWS} more parameters")
        if self.activations:
            cells = [
                [
                    s.name,
                    f"{s.largest:.3g}",
                    f"{s.smallest:.3g}",
                    _share(s.share_of_zeros),
                    _share(s.flushed(FP16)),
                    str(s.nonfinite),
                ]
                for s in self.activations[:_MOST_ROWS]
            ]
            lines += ["", *_table(["output of", "largest", "smallest", "zeros", "below fp16", "not finite"], cells)]
        if self.events:
            counts = Counter(event.kind for event in self.events)
            lines += ["", "Events: " + ", ".join(f"{kind} {count}" for kind, count in counts.items())]
            lines += [f"  {event}" for event in self.events if event.kind not in {"skip", "scale"}][-_MOST_ROWS:]
        return "\n".join(lines)


_HEADER = [
    "parameter",
    "gradient max",
    "min",
    "zeros",
    "below fp16",
    "below bf16",
    "not finite",
    "weight max",
    "update/weight",
    "lost",
]


def _cells(row: ParameterRow) -> list[str]:
    grad, weight, update = row.gradient, row.weight, row.update
    gradient = ["-"] * 6
    if grad is not None:
        gradient = [
            f"{grad.largest:.3g}",
            f"{grad.smallest:.3g}",
            _share(grad.share_of_zeros),
            _share(grad.flushed(FP16)),
            _share(grad.flushed(BF16)),
            str(grad.nonfinite),
        ]
    return [
        row.name,
        *gradient,
        "-" if weight is None else f"{weight.largest:.3g}",
        "-" if update is None else f"{update.ratio:.2g}",
        "-" if update is None else _share(update.lost),
    ]


def _share(value: float) -> str:
    return "0" if value == 0 else f"{100 * value:.3g} %"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join((first, *rest)).rstrip()

    return [line(header), *map(line, rows)]
