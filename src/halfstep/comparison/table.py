"""The table of a comparison, as text cells."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.comparison.estimate import Estimate
from halfstep.comparison.rows import Row
from halfstep.hardware.units import bytes_text, seconds_text

__all__ = ["fit_columns", "plain_table", "show_interval", "table_cells"]

HEADINGS = ("precision", "step", "samples/s", "speed", "peak", "loss", "gap to fp32", "metric", "skipped", "cosine")
# Columns that a narrow terminal drops, in this order.
_DISPENSABLE = ("cosine", "loss", "skipped", "step", "metric", "samples/s", "gap to fp32")


def table_cells(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings, and one row of cells for each row; empty columns are left out."""
    cells = [_cells(row) for row in rows]
    used = [i for i in range(len(HEADINGS)) if i == 0 or any(line[i] not in {"", "-"} for line in cells)]
    return tuple(HEADINGS[i] for i in used), [tuple(line[i] for i in used) for line in cells]


def fit_columns(
    headings: Sequence[str], cells: Sequence[Sequence[str]], width: int
) -> tuple[list[str], list[list[str]], list[str]]:
    """The table without the columns that do not fit into `width`, and the names of the dropped ones."""
    columns, dropped = list(range(len(headings))), []
    for name in _DISPENSABLE:
        widths = [max(len(line[i]) for line in (headings, *cells)) for i in columns]
        if sum(widths) + 2 * len(widths) <= width:
            break
        if name in headings:
            columns.remove(headings.index(name))
            dropped.append(name)
    return [headings[i] for i in columns], [[line[i] for i in columns] for line in cells], dropped


def _cells(row: Row) -> tuple[str, ...]:
    if row.step_seconds is None:
        return (row.label, "failed", *([""] * (len(HEADINGS) - 2)))
    failed = " failed" if row.status == "failed" else ""
    return (
        row.label + failed,
        seconds_text(row.step_seconds.value),
        _number(row.samples_per_second),
        show_interval(row.speedup),
        "-" if row.peak_bytes is None else bytes_text(row.peak_bytes),
        "-" if row.loss is None else f"{row.loss.value:.4f}",
        _gap(row),
        _metric(row.metric),
        str(row.skips),
        "-" if row.cosine is None else f"{row.cosine:.5f}",
    )


def _gap(row: Row) -> str:
    if row.loss_gap is None:
        return "-"
    return f"{row.loss_gap.value:+.4f}{' beyond noise' if row.beyond_noise else ''}"


def _metric(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    half = (estimate.high - estimate.low) / 2
    return f"{estimate.value:.4f}" + (f" +- {half:.4f}" if half else "")


def _number(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:,.0f}" if estimate.value >= 100 else f"{estimate.value:.3g}"


def show_interval(estimate: Estimate | None) -> str:
    """A ratio with its interval."""
    if estimate is None:
        return "-"
    if estimate.low == estimate.high:
        return f"{estimate.value:.2f}x"
    return f"{estimate.value:.2f}x ({estimate.low:.2f} to {estimate.high:.2f})"


def plain_table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces."""
    widths = [max(len(line[i]) for line in (headings, *cells)) for i in range(len(headings))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in (headings, *cells)
    ]
    return "\n".join(line.rstrip() for line in lines)
