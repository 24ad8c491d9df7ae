"""A plan as one HTML page without scripts: bars are boxes with a width, so they print; templates/plan.html.j2 lays it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halfstep.hardware.units import gib_text
from halfstep.report.html_page import render_html
from halfstep.report.html_table import Table, data_table
from halfstep.report.memory_parts import MEMORY_COLOURS, OTHER_COLOUR, in_order
from halfstep.report.plan import grouped, in_micro_batches, largest_text
from halfstep.report.ranks.plan import hours_table, rank_tables

if TYPE_CHECKING:
    from halfstep.planning import Plan

__all__ = ["plan_values", "render_plan_page"]


def render_plan_page(plan: Plan) -> str:
    """The page as text."""
    return render_html("plan.html.j2", plan_values(plan))


def plan_values(plan: Plan) -> dict[str, Any]:
    """Everything the page shows."""
    parts = in_order(name for entry in plan.entries for name in entry.estimate.peak.breakdown)
    several = [data_table(*item) for item in rank_tables(plan)] if plan.entries[0].answers else []
    hours = [] if plan.budget is None else [data_table(*hours_table(plan))]
    tables = [_summary(plan, parts), _strategies(plan), *several, *hours, _modules(plan)]
    return {
        "title": f"Memory of {plan.job}",
        "about": _about(plan),
        "bars": _bars(plan, parts),
        "legend": [(name, _colour(name)) for name in parts],
        "tables": [table for table in tables if table is not None],
        "notes": plan.notes,
    }


def _about(plan: Plan) -> str:
    micro_batches = f" in {plan.accumulate} micro-batches" if plan.accumulate > 1 else ""
    recompute = "" if plan.recompute is None else f", recompute={plan.recompute}"
    gpu = ""
    if plan.capacity is not None:
        total, usable = gib_text(plan.capacity.total_bytes), gib_text(plan.capacity.usable_bytes)
        gpu = f" on {plan.capacity.name} ({total} GiB, {usable} GiB usable)"
    return f"Batch {plan.batch}{micro_batches}{recompute}{gpu}."


def _colour(name: str) -> str:
    return MEMORY_COLOURS.get(name, OTHER_COLOUR)


def _bars(plan: Plan, parts: list[str]) -> list[dict[str, Any]]:
    """One bar for each precision; the longest fills the width."""
    longest = max(entry.peak_bytes for entry in plan.entries)
    bars = []
    for entry in plan.entries:
        breakdown = entry.estimate.peak.breakdown
        pieces = [
            {
                "percent": f"{100 * breakdown[name] / longest:.2f}",
                "colour": _colour(name),
                "title": f"{name}: {gib_text(breakdown[name])} GiB",
            }
            for name in parts
            if name in breakdown
        ]
        bars.append({"label": entry.precision, "total": gib_text(entry.peak_bytes), "parts": pieces})
    return bars


def _summary(plan: Plan, parts: list[str]) -> Table:
    fits = {True: "yes", False: "no", None: "unknown"}
    rows = [
        [
            entry.precision,
            fits[entry.fits],
            entry.min_gpus or "-",
            largest_text(entry),
            *(gib_text(entry.estimate.peak.breakdown.get(name, 0)) for name in parts),
        ]
        for entry in plan.entries
    ]
    return data_table("In numbers", ["precision", "fits one GPU", "min GPUs", "largest micro-batch", *parts], rows)


def _strategies(plan: Plan) -> Table | None:
    if not any(entry.answers for entry in plan.entries):
        return None
    heads = ["precision", *(answer.strategy for answer in plan.entries[0].answers)]
    rows = [
        [
            entry.precision,
            *(
                f"{a.num_gpus or 'none'} x {a.micro_batch}, {a.decides}" if not a.rejected else "-"
                for a in entry.answers
            ),
        ]
        for entry in plan.entries
    ]
    return data_table(
        f"Minimum GPUs x examples per GPU{in_micro_batches(plan)}, and the limiting category", heads, rows
    )


def _modules(plan: Plan) -> Table | None:
    first = plan.entries[0]
    rows = [[name, count, gib_text(size)] for name, count, size in grouped(first.estimate.peak.modules)[:10]]
    if not rows:
        return None
    return data_table(f"Activations in {first.precision} by module, largest first", ["module", "count", "GiB"], rows)
