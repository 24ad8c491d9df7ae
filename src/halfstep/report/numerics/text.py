"""The terminal's view of a run: loss, scale and skips, the worst tensors with their exponents, and what was reported."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from halfstep.report.numerics.view import KINDS, RunView, TensorRow, worst
from halfstep.report.theme import STRONG

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

__all__ = ["exponent_bar", "render_view", "sparkline"]

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_PLAIN = "_.-~=+*#"
_WORST, _EVENTS, _WIDTH = 4, 5, 48
_NAME = 24  # characters of a tensor's name
# What a screen has, from most to least: tensors of each kind, whether their exponents may have a table of their own, events.
_SIZES = ((_WORST, True, _EVENTS), (_WORST, False, _EVENTS), (2, False, 3), (1, False, 2), (1, False, 1))


def render_view(view: RunView, console: Console, *, height: int | None = None) -> RenderableType:
    """Everything, or as much as fits into a screen of `height` lines."""
    screens = (_screen(view, console, *size) for size in _SIZES)
    if height is None:
        return next(screens)
    for screen in screens:
        if len(console.render_lines(screen, pad=False)) <= height:
            break
    return screen


def _screen(view: RunView, console: Console, num_tensors: int, separate: bool, num_events: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    marks = _BLOCKS if (console.encoding or "").lower().startswith("utf") else _PLAIN
    parts: list[Any] = [Text(line) for line in _summary(view, marks)]
    if view.rows:
        parts += [Text(""), *_tensors(view, marks, console, num_tensors, separate)]
    elif view.points:
        parts.append(Text("no samples of gradients and weights: train with --set watch=100"))
    if view.events:
        parts += [Text(""), *_event_lines(view, num_events)]
    return Group(*parts)


def _summary(view: RunView, marks: str) -> list[str]:
    lines = [f"{view.run}  {view.policy}  {view.state(time.time())}", view.command]
    if not view.points:
        return [*lines, "no step recorded yet"]
    last = view.points[-1]
    total = f" of {view.total_steps}" if view.total_steps else ""
    losses = [point.loss for point in view.points]
    rate = "" if math.isnan(last.rate) else f"  {last.rate:,.0f}/s"
    lines.append(f"step {last.step}{total}{rate}  skipped {view.skips}")
    lines.append(f"loss   {_number(last.loss):>10}  {sparkline(losses, marks, _WIDTH)}")
    if any(point.scale != 1.0 for point in view.points):
        scales = [math.log2(point.scale) if point.scale > 0 else math.nan for point in view.points]
        lines.append(f"scale  {f'2^{scales[-1]:.0f}':>10}  {sparkline(scales, marks, _WIDTH)}")
    return lines


def sparkline(values: Sequence[float], marks: str, width: int) -> str:
    """The course of a series in `width` characters: each is the mean of its stretch, x where none is finite."""
    stretches = min(width, len(values))
    bounds = [round(i * len(values) / stretches) for i in range(stretches + 1)]
    means: list[float | None] = []
    for start, end in itertools.pairwise(bounds):
        finite = [v for v in values[start:end] if math.isfinite(v)]
        means.append(sum(finite) / len(finite) if finite else None)
    known = [mean for mean in means if mean is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    step = (high - low) / (len(marks) - 1) or 1.0
    return "".join("x" if mean is None else marks[round((mean - low) / step)] for mean in means)


def exponent_bar(row: TensorRow, low: int, high: int, marks: str) -> str:
    """The share of elements by exponent, from 2^low to 2^high; a blank where there is none."""
    most = max(row.bins.values(), default=0)
    cells = []
    for exponent in range(low, high + 1):
        count = row.bins.get(exponent, 0)
        cells.append(" " if not count else marks[round((len(marks) - 1) * count / most)])
    return "".join(cells)


def _tensors(view: RunView, marks: str, console: Console, number: int, separate: bool) -> Iterable[RenderableType]:
    """The worst tensors of each kind, and their exponents: in the same table where they fit, else below it if `separate`."""
    from rich.text import Text

    rows = [row for kind in KINDS for row in worst((r for r in view.rows if r.kind == kind), number)]
    exponents = [e for row in rows for e in row.bins]
    high = max(exponents, default=0)
    low = max(min(exponents, default=0), high - _WIDTH + 1)
    bars, span = [exponent_bar(row, low, high, marks) for row in rows], f"2^{low} to 2^{high}"
    table = _table(_HEADS, [_cells(row) for row in rows])
    fits = console.measure(table).maximum + 1 + max(len(span), high - low + 1) <= console.width
    if fits:
        table = _table((*_HEADS, span), [(*_cells(row), bar) for row, bar in zip(rows, bars, strict=True)])
    yield Text(f"worst tensors at step {view.sampled_at}, in {view.format}", style=STRONG)
    yield table
    if separate and not fits:
        below = [(*_cells(row)[:2], bar) for row, bar in zip(rows, bars, strict=True)]
        yield Text("")
        yield _table((*_HEADS[:2], f"exponents {span}"), below)


_HEADS = ("tensor", "of", "bad", "zero", "flushed", "largest", "update", "lost")


def _cells(row: TensorRow) -> tuple[str, ...]:
    return (
        _short(row.name),
        row.kind,
        str(row.nonfinite or "-"),
        _share(row.zeros),
        _share(row.flushed),
        f"{row.largest:.1e}",
        "-" if row.ratio is None else f"{row.ratio:.0e}",
        "-" if row.lost is None else _share(row.lost),
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right" if head in _HEADS[2:] else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _short(name: str) -> str:
    """The end of a long name, which tells tensors apart."""
    return name if len(name) <= _NAME else f"..{name[2 - _NAME :]}"


def _event_lines(view: RunView, number: int) -> list[Any]:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    lines: list[Any] = []
    for event in view.events[-number:]:
        at = "" if event.step is None else f"step {event.step}: "
        # Lines that wrap are indented, so that each event begins at the margin.
        head = Table.grid(padding=(0, 1, 0, 0))
        head.add_row(Text(f"{at}{event.kind}:", no_wrap=True), Text(event.text))
        lines.append(head)
        if event.advice:
            lines.append(Padding(Text(event.advice), (0, 0, 0, 4)))
    return lines


def _share(value: float) -> str:
    if not value:
        return "-"
    return "<0.1%" if value < 0.001 else f"{100 * value:.1f}%"


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)
