"""The device hours of a comparison's rows, at the speed that was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.comparison.result import Comparison
    from halfstep.comparison.rows import Row
    from halfstep.planning.ranks.hours import Budget

__all__ = ["hours_text", "row_hours"]


def row_hours(comparison: Comparison, budget: Budget) -> dict[str, Any]:
    """Hours and cost of each row that ran, at its mean time of a step."""
    rows = {}
    for row in comparison.rows:
        rate = _rate(row)
        if rate is not None:
            rows[row.label] = {
                "examples_per_second": rate,
                "gpu_hours": budget.gpu_hours(rate / row.num_ranks),
                "cost": budget.cost(rate / row.num_ranks),
            }
    return {"epochs": budget.epochs, "examples": budget.examples, "price": budget.price, "rows": rows}


def _rate(row: Row) -> float | None:
    """Examples per second at the mean time of a step: slow steps count in a run, and the median ignores them."""
    if row.samples_per_second is None or row.step_seconds is None or not row.mean_seconds:
        return None
    return row.samples_per_second.value * row.step_seconds.value / row.mean_seconds


def hours_text(comparison: Comparison, budget: Budget) -> str:
    """The hours as a table."""
    from halfstep.hardware.tables import plain_table

    unit = "GPU-hours" if all(survey.device != "cpu" for survey in comparison.surveys) else "hours of this CPU"
    hours = row_hours(comparison, budget)["rows"]
    headings = ["precision", "samples/s, mean", unit, *([] if budget.price is None else ["cost"])]
    cells = []
    for label, values in hours.items():
        line = [label, f"{values['examples_per_second']:,.1f}", _number(values["gpu_hours"])]
        cells.append([*line, *([] if budget.price is None else [f"{values['cost']:,.2f}"])])
    title = f"{unit} for {budget.epochs:g} epochs of {budget.examples:,} examples, at the measured mean speed of {_devices(comparison)}"
    return f"{title}\n{plain_table(headings, cells)}"


def _devices(comparison: Comparison) -> str:
    counts = {row.num_ranks for row in comparison.rows}
    return "one device" if counts <= {1} else f"{' or '.join(map(str, sorted(counts)))} ranks"


def _number(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.3g}"
