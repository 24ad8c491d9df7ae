"""The table of a comparison, as cells of text."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.comparison.estimate import Estimate
from halfstep.comparison.rows import Row

__all__ = ["fit_columns", "plain_table", "show_bytes", "show_interval", "show_seconds", "table_cells"]

HEADINGS = ("precision", "step", "samples/s", "speed", "peak", "loss", "gap to fp32", "metric", "skipped", "cosine")
# What a narrow terminal does without, the first first.
_DISPENSABLE = ("cosine", "loss", "skipped", "step", "metric", "samples/s", "gap to fp32")


def table_cells(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings, and one row of cells for each row; a column nobody fills is left out."""
    cells = [_cells(row) for row in rows]
    used = [i for i in range(len(HEADINGS)) if i == 0 or any(line[i] not in {"", "-"} for line in cells)]
    return tuple(HEADINGS[i] for i in used), [tuple(line[i] for i in used) for line in cells]


def fit_columns(
    headings: Sequence[str], cells: Sequence[Sequence[str]], width: int
) -> tuple[list[str], list[list[str]], list[str]]:
    """The table without the columns that do not fit into `width`, the least telling first, and which those were."""
    kept, dropped = list(range(len(headings))), []
    for name in _DISPENSABLE:
        widths = [max(len(line[i]) for line in (headings, *cells)) for i in kept]
        if sum(widths) + 2 * len(widths) <= width:
            break
        if name in headings:
            kept.remove(headings.index(name))
            dropped.append(name)
    return [headings[i] for i in kept], [[line[i] for i in kept] for line in cells], dropped


def _cells(row: Row) -> tuple[str, ...]:
    if row.step_seconds is None:
        return (row.label, "failed", *([""] * (len(HEADINGS) - 2)))
    failed = " failed" if row.status == "failed" else ""
    return (
        row.label + failed,
        show_seconds(row.step_seconds.value),
        _number(row.samples_per_second),
        show_interval(row.speedup),
        "-" if row.peak_bytes is None else show_bytes(row.peak_bytes),
        "-" if row.loss is None else f"{row.loss.value:.4f}",
        _gap(row),
        _metric(row.metric),
        str(row.skips),
        "-" if row.cosine is None else f"{row.cosine:.5f}",
    )


def _gap(row: Row) -> str:
    if row.loss_gap is None:
        return "-"
    mark = "" if row.beyond_noise is None else " beyond noise" if row.beyond_noise else ""
    return f"{row.loss_gap.value:+.4f}{mark}"


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


def show_seconds(seconds: float) -> str:
    """A time in the unit a person would choose."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def show_bytes(count: float) -> str:
    """A size in the unit a person would choose."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"


def plain_table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Aligned columns with nothing but spaces between them."""
    widths = [max(len(line[i]) for line in (headings, *cells)) for i in range(len(headings))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in (headings, *cells)
    ]
    return "\n".join(line.rstrip() for line in lines)
