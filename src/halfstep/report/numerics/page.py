"""A run's numbers as one HTML page without scripts: curves and the heat map of exponents are SVG; templates/watch.html.j2."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from halfstep.report.html_page import render_html
from halfstep.report.html_table import Table, data_table
from halfstep.report.numerics.heat import heat_maps
from halfstep.report.numerics.view import KINDS, RunView, format_of, worst

__all__ = ["render_watch_page", "watch_values"]

_POINTS = 600  # of a curve
_SKIPS = 50  # skipped steps that are listed
_WIDTH, _HEIGHT = 1000, 160


def render_watch_page(view: RunView) -> str:
    """The page as text."""
    return render_html("watch.html.j2", watch_values(view))


def watch_values(view: RunView) -> dict[str, Any]:
    """Everything the page shows."""
    steps = [point.step for point in view.points]
    skipped = [point.step for point in view.points if point.skipped]
    curves = [_curve("Loss", steps, [point.loss for point in view.points])]
    if any(point.scale != 1.0 for point in view.points):
        scales = [math.log2(point.scale) if point.scale > 0 else math.nan for point in view.points]
        curves.append(_curve("Loss scale, as a power of 2", steps, scales, skipped))
    return {
        "title": f"Run {view.run}",
        "about": f"{view.policy}. {view.command}",
        "tiles": _tiles(view),
        "curves": [curve for curve in curves if curve is not None],
        "skipped": skipped[:_SKIPS],
        "skipped_more": len(skipped[_SKIPS:]),
        "heat": heat_maps(view.rows, format_of(view.format)),
        "tables": [table for table in (_worst_table(view), _event_table(view)) if table is not None],
        "sampled_at": view.sampled_at,
        "format": view.format,
    }


def _tiles(view: RunView) -> list[tuple[str, str]]:
    last = view.points[-1] if view.points else None
    tiles = [("steps", str(last.step if last else 0)), ("skipped", str(view.skips))]
    if last is not None:
        tiles.append(("last loss", f"{last.loss:.4g}"))
        if last.scale != 1.0:
            tiles.append(("loss scale", f"2^{math.log2(last.scale):.0f}" if last.scale > 0 else str(last.scale)))
    tiles.append(("state when this page was written", view.state(time.time())))
    return tiles


def _curve(
    title: str, steps: Sequence[int], values: Sequence[float], marks: Sequence[int] = ()
) -> dict[str, Any] | None:
    """A line through the finite values; a gap where one is not finite, and a mark at each of the steps `marks`."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    span, first, last = high - low, steps[0], steps[-1]
    stride = -(-len(values) // _POINTS)
    lines: list[list[str]] = [[]]
    for step, value in list(zip(steps, values, strict=True))[::stride]:
        if not math.isfinite(value):
            lines.append([])
            continue
        x = _WIDTH * (step - first) / ((last - first) or 1)
        y = _HEIGHT - (_HEIGHT - 10) * ((value - low) / span if span else 0.5) - 5
        lines[-1].append(f"{x:.1f},{y:.1f}")
    return {
        "title": title,
        "low": f"{low:.4g}",
        "high": f"{high:.4g}",
        "first": first,
        "last": last,
        "lines": [" ".join(line) for line in lines if line],
        "marks": [f"{_WIDTH * (step - first) / ((last - first) or 1):.1f}" for step in marks],
        "width": _WIDTH,
        "height": _HEIGHT,
    }


def _worst_table(view: RunView) -> Table | None:
    rows = [
        (
            row.name,
            row.kind,
            row.nonfinite or "-",
            f"{100 * row.zeros:.2g} %",
            f"{100 * row.flushed:.2g} %",
            f"{100 * row.subnormal:.2g} %",
            f"{row.largest:.4g}",
            "-" if row.ratio is None else f"{row.ratio:.1e}",
            "-" if row.lost is None else f"{100 * row.lost:.2g} %",
        )
        for kind in KINDS
        for row in worst((r for r in view.rows if r.kind == kind), 10)
    ]
    heads = ["tensor", "of", "not finite", "zero", "flushed", "subnormal", "largest", "update / weight", "updates lost"]
    return data_table(f"Worst tensors at step {view.sampled_at}, in {view.format}", heads, rows) if rows else None


def _event_table(view: RunView) -> Table | None:
    rows = tuple((str(e.step if e.step is not None else "-"), e.kind, e.text, e.advice) for e in view.events[-100:])
    if not rows:
        return None
    return Table("Reported", ("step", "event", "what", "advice"), rows, prose=frozenset({1, 2, 3}), caption="Reported")
