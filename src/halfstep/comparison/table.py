"""The table of a comparison, as text cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from halfstep.comparison.estimate import Estimate
from halfstep.comparison.rows import Row
from halfstep.hardware.units import bytes_text, seconds_text

__all__ = ["at_step", "fit_columns", "show_interval", "show_layer", "show_share", "table_cells"]

HEADINGS = (
    "precision",
    "step",
    "samples/s",
    "speed",
    "peak",
    "GPU peak",
    "loss",
    "gap to fp32",
    "metric",
    "skipped",
    "cosine",
    "underflow",
    "worst layer",
)
# Columns that a narrow terminal drops, in this order.
_DISPENSABLE = (
    "cosine",
    "loss",
    "step",
    "worst layer",
    "skipped",
    "underflow",
    "metric",
    "samples/s",
    "gap to fp32",
    "GPU peak",
)
_LONGEST_NAME = 24  # of a layer, in a terminal
# What a layer is shown with when gradients are not finite, by `measurements.Numerics.overflowed`.
_OVERFLOWS = {
    "forward": "forward overflow",
    "backward": "backward overflow",
    "data": "inf or NaN in the data",
    "weights": "inf or NaN in the weights",
    "output": "output not finite",
    "gradient": "gradient not finite",
}


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
        "-" if row.predicted_gpu is None else bytes_text(row.predicted_bytes or 0),
        "-" if row.loss is None else f"{row.loss.value:.4f}{at_step(row)}",
        _gap(row),
        _metric(row),
        str(row.skips),
        "-" if row.cosine is None else f"{row.cosine:.5f}",
        "-" if row.underflow is None else show_share(row.underflow),
        _layer(row),
    )


def show_share(share: float) -> str:
    """A share in percent; one that is not 0 never looks like 0."""
    return "0 %" if share == 0 else f"{100 * share:.3g} %" if share >= 1e-4 else "<0.01 %"


def show_layer(row: Row) -> str:
    """The worst layer of a row and what is wrong with it."""
    if row.worst_layer is None:
        return "-"
    if row.overflowed is not None:
        return f"{row.worst_layer}: {_OVERFLOWS.get(row.overflowed, row.overflowed)}"
    return row.worst_layer if row.worst_underflow is None else f"{row.worst_layer} {show_share(row.worst_underflow)}"


def _layer(row: Row) -> str:
    """The same for a narrow column: the end of a long name, and an overflow, but no share."""
    name = row.worst_layer or "-"
    name = name if len(name) <= _LONGEST_NAME else f"..{name[2 - _LONGEST_NAME :]}"
    return show_layer(replace(row, worst_layer=name, worst_underflow=None))


def _gap(row: Row) -> str:
    if row.loss_gap is None:
        return "-"
    return f"{row.loss_gap.value:+.4f}{' beyond noise' if row.beyond_noise else ''}{at_step(row)}"


def _metric(row: Row) -> str:
    if row.metric is None:
        return "-"
    half = (row.metric.high - row.metric.low) / 2
    return f"{row.metric.value:.4f}" + (f" +- {half:.4f}" if half else "") + at_step(row)


def at_step(row: Row) -> str:
    """The step of a value that other rows have at the end of their training: " at step 42", or nothing."""
    return "" if row.cut_at is None else f" at step {row.cut_at}"


def _number(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:,.0f}" if estimate.value >= 100 else f"{estimate.value:.3g}"


def show_interval(estimate: Estimate | None) -> str:
    """A ratio with its interval."""
    if estimate is None:
        return "-"
    if estimate.low == estimate.high:
        return f"{estimate.value:.2f}x"
    return f"{estimate.value:.2f}x ({estimate.low:.2f} to {estimate.high:.2f})"
