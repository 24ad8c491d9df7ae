"""A plan as text for a terminal and as plain data for JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from halfstep.hardware.units import gib_text
from halfstep.report.memory_parts import in_order
from halfstep.report.ranks.plan import answer_data, hours_data, hours_table, rank_tables

if TYPE_CHECKING:
    from halfstep.planning import Answer, Entry, FoundBatch, MeasuredStep, Plan

__all__ = [
    "WIDTH",
    "as_data",
    "as_text",
    "batch_data",
    "batch_text",
    "captioned",
    "count_text",
    "grouped",
    "in_micro_batches",
    "largest_text",
    "verified_data",
    "verified_text",
]

MAX_MODULES = 10
WIDTH = 100  # outside a terminal
Table = tuple[str, list[str], list[list[str]]]  # title, headings, rows


def as_text(plan: Plan, width: int = WIDTH) -> str:
    """The whole plan for a terminal of `width` columns."""
    parts = [_wrap(_title(plan), width), table(*_summary(plan), width)]
    tables = [_gpus(plan), *rank_tables(plan)] if any(entry.answers for entry in plan.entries) else []
    if plan.budget is not None:
        tables.append(hours_table(plan))
    tables += [_categories(plan), _modules(plan.entries[0])]
    parts += [captioned(*item, width) for item in tables if item[-1]]
    parts += [_wrap(_uncertainty(plan), width), _wrap("\n".join(f"- {note}" for note in plan.notes), width)]
    return "\n\n".join(part for part in parts if part)


def _wrap(text: str, width: int) -> str:
    """Each line wrapped, the rest of an item of a list indented."""
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent="  " if line.startswith("- ") else "", break_on_hyphens=False)
        for line in text.splitlines()
    )


def _title(plan: Plan) -> str:
    micro_batches = f" in {plan.accumulate} micro-batches" if plan.accumulate > 1 else ""
    recompute = "" if plan.recompute is None else f", recompute={plan.recompute}"
    gpus = ""
    if plan.capacity is not None:
        count = f"{plan.gpus} x " if plan.gpus else ""
        total, usable = gib_text(plan.capacity.total_bytes), gib_text(plan.capacity.usable_bytes)
        gpus = f" on {count}{plan.capacity.name} ({total} GiB, {usable} GiB usable for tensors)"
    return (
        f"Plan for {plan.job}, batch {plan.batch}{micro_batches}{recompute}{gpus}\n"
        f"Predicted in {plan.seconds:.1f} s without running it; sizes in GiB."
    )


def _summary(plan: Plan) -> tuple[list[str], list[list[str]]]:
    head = [
        "precision",
        "peak",
        "model state",
        "activations",
        "peak at",
        "one GPU",
        "min GPUs",
        "largest micro-batch",
    ]
    rows = []
    for entry in plan.entries:
        peak = entry.estimate.peak
        best = next((a for a in entry.answers if a.num_gpus is not None and a.num_gpus == entry.min_gpus), None)
        min_gpus = (
            "none" if entry.answers and best is None else "-" if best is None else f"{best.num_gpus} ({best.strategy})"
        )
        largest = "-" if not entry.answers else "none" if entry.largest is None else largest_text(entry)
        fits = "fits with recompute" if entry.recomputed else {True: "fits", False: "too large", None: "-"}[entry.fits]
        activations = gib_text(peak.breakdown.get("activations", 0))
        rows.append(
            [
                entry.precision,
                gib_text(peak.allocated),
                gib_text(entry.state_bytes),
                activations,
                peak.moment,
                fits,
                min_gpus,
                largest,
            ]
        )
    return head, rows


def largest_text(entry: Entry) -> str:
    """The largest micro-batch and how many of them make up the batch."""
    if entry.largest is None:
        return "-"
    return f"{entry.largest.batch}{' or more' if entry.largest.at_end else ''} x {entry.accumulate}"


def _gpus(plan: Plan) -> Table:
    strategies = [a.strategy for a in plan.entries[0].answers]
    rows = [[entry.precision, *map(count_text, entry.answers)] for entry in plan.entries]
    limit = f" (at most {plan.gpus})" if plan.gpus else ""
    title = f"By strategy: minimum GPUs{limit} x examples per GPU{in_micro_batches(plan)} (limiting category)"
    return title, ["precision", *strategies], rows


def count_text(answer: Answer) -> str:
    """The smallest number of GPUs of a strategy, and what decides it."""
    if answer.rejected:
        return "-"
    if answer.num_gpus is None:
        return f"none ({answer.decides})"
    return f"{answer.num_gpus} x {answer.micro_batch} ({answer.decides})"


def captioned(title: str, head: list[str], rows: list[list[str]], width: int = WIDTH) -> str:
    """A table under its title."""
    return f"{_wrap(title, width)}\n{table(head, rows, width)}"


def in_micro_batches(plan: Plan) -> str:
    """How each GPU processes its examples: all at once, or in the requested micro-batches."""
    return ", without accumulation" if plan.accumulate == 1 else f" in each of {plan.accumulate} micro-batches"


def _categories(plan: Plan) -> Table:
    names = in_order(name for entry in plan.entries for name in entry.estimate.peak.breakdown)
    rows = [[name, *(gib_text(e.estimate.peak.breakdown.get(name, 0)) for e in plan.entries)] for name in names]
    rows.append(["sum = peak", *(gib_text(e.peak_bytes) for e in plan.entries)])
    rows.append(["reserved by torch", *(gib_text(e.estimate.peak.reserved) for e in plan.entries)])
    return "Peak memory by category", ["category", *(e.precision for e in plan.entries)], rows


def _modules(entry: Entry) -> Table:
    rows = [
        [name, str(count), gib_text(size)] for name, count, size in grouped(entry.estimate.peak.modules)[:MAX_MODULES]
    ]
    return f"Activations in {entry.precision} by module, largest first", ["module", "count", "total"], rows


def grouped(modules: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Modules whose names differ only in numbers as one: name with * for the numbers, count, bytes; largest first."""
    groups: dict[str, tuple[int, int]] = {}
    for name, size in modules.items():
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "(outside any module)"
        count, total = groups.get(kind, (0, 0))
        groups[kind] = count + 1, total + size
    return sorted(((name, count, size) for name, (count, size) in groups.items()), key=lambda row: -row[2])


def _uncertainty(plan: Plan) -> str:
    lines = ["Uncertainty"]
    workspaces = {e.precision: e.estimate.peak.breakdown.get("workspaces", 0) for e in plan.entries}
    largest = max(workspaces, key=lambda precision: workspaces[precision])
    lines.append(
        f"- workspaces ({gib_text(workspaces[largest])} in {largest}): cuDNN selects its algorithms by GPU and version"
    )
    for entry in plan.entries:
        extra = entry.estimate.peak_bytes - entry.estimate.need_bytes
        if extra > 0:
            lines.append(
                f"- transforms ({gib_text(extra)} more at the peak in {entry.precision}): in IEEE fp32, cuDNN transforms whole images for some "
                "convolutions if memory allows, and a few more images can switch it on or off; this was never observed with "
                f"TF32 or 16 bits. Without that memory torch uses another algorithm, and {gib_text(entry.estimate.need_bytes)} are enough."
            )
    if plan.capacity is not None:
        context = gib_text(plan.capacity.context_bytes)
        lines.append(
            f"- CUDA context: {context} subtracted from the GPU's memory; 0.4 to 0.7 depending on GPU and driver"
        )
        lines.append(
            f"- fragmentation: {plan.capacity.fragmentation:.0%} subtracted; 'reserved by torch' above is the whole cache"
        )
        lines.append(f"- GPU memory: {plan.capacity.source}")
    return "\n".join(lines)


def table(head: list[str], rows: list[list[str]], width: int = WIDTH) -> str:
    """A plain table: the first column left-aligned, the others right-aligned.

    If it is wider than `width`, headings are broken at their spaces; if that is not enough, the columns that do not fit
    follow in a further table with the same first column.
    """
    lines = _lines([head], rows)
    if max(map(len, lines)) <= width:
        return "\n".join(lines)
    upper, lower = zip(
        *((h.partition(" ")[0], h.partition(" ")[2]) if " " in h else ("", h) for h in head), strict=True
    )
    heads = [list(upper), list(lower)] if any(upper) else [head]
    fitting = len(head)
    while fitting > 2 and max(map(len, _lines([h[:fitting] for h in heads], [row[:fitting] for row in rows]))) > width:
        fitting -= 1
    first = "\n".join(_lines([h[:fitting] for h in heads], [row[:fitting] for row in rows]))
    if fitting == len(head):
        return first
    rest = table([head[0], *head[fitting:]], [[row[0], *row[fitting:]] for row in rows], width)
    return f"{first}\n\n{rest}"


def _lines(heads: list[list[str]], rows: list[list[str]]) -> list[str]:
    """The lines of a table, all as wide as its rule."""
    widths = [max(len(row[i]) for row in [*heads, *rows]) for i in range(len(heads[0]))]
    rule = "  " + "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines = []
    for row in [*heads, *rows]:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    lines.insert(len(heads), rule)
    return lines


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    capacity = plan.capacity
    return {
        "job": plan.job,
        "batch": plan.batch,
        "accumulate": plan.accumulate,
        "recompute": plan.recompute,
        "gpu": None
        if capacity is None
        else {
            "name": capacity.name,
            "memory_bytes": capacity.total_bytes,
            "usable_bytes": capacity.usable_bytes,
            "context_bytes": capacity.context_bytes,
            "source": capacity.source,
        },
        "gpus": plan.gpus,
        "bandwidth": plan.bandwidth,
        **hours_data(plan),
        "entries": [_entry_data(entry) for entry in plan.entries],
        "notes": list(plan.notes),
        "seconds": round(plan.seconds, 3),
    }


def _entry_data(entry: Entry) -> dict[str, Any]:
    peak = entry.estimate.peak
    return {
        "precision": entry.precision,
        "batch": entry.batch,
        "micro_batch": entry.estimate.batch,
        "peak_bytes": entry.peak_bytes,
        "need_bytes": entry.estimate.need_bytes,
        "reserved_bytes": peak.reserved,
        "moment": peak.moment,
        "module": peak.module,
        "breakdown": dict(peak.breakdown),
        "activations_by_module": dict(list(peak.modules.items())[:MAX_MODULES]),
        "phases": dict(peak.phases),
        "model_state_bytes": entry.state_bytes,
        "build_bytes": entry.estimate.build_bytes,
        "num_params": entry.estimate.num_params,
        "fits": entry.fits,
        "min_gpus": entry.min_gpus,
        "strategies": [answer_data(answer) for answer in entry.answers],
        "on_all_gpus": [answer_data(answer) for answer in entry.exact],
        "largest_micro_batch": None if entry.largest is None else entry.largest.batch,
        "accumulate": entry.accumulate,
        "peak_bytes_with_recompute": None if entry.recomputed is None else entry.recomputed.peak_bytes,
    }


def verified_text(rows: list[tuple[Entry, MeasuredStep]]) -> str:
    """Predicted next to measured."""
    cells = [
        [
            entry.precision,
            str(measured.batch),
            gib_text(entry.peak_bytes),
            gib_text(measured.peak_bytes),
            f"{measured.error(entry.estimate):+.1%}",
        ]
        for entry, measured in rows
    ]
    device = rows[0][1].device if rows else ""
    heads = ["precision", "batch", "predicted", "measured", "error"]
    return f"Predicted and measured on {device}\n" + table(heads, cells)


def verified_data(rows: list[tuple[Entry, MeasuredStep]]) -> list[dict[str, Any]]:
    """Predicted next to measured, as plain values."""
    return [
        {
            "precision": entry.precision,
            "batch": measured.batch,
            "peak_bytes": entry.peak_bytes,
            "measured_bytes": measured.peak_bytes,
            "measured_reserved_bytes": measured.reserved_bytes,
            "error": measured.error(entry.estimate),
            "device": measured.device,
        }
        for entry, measured in rows
    ]


def batch_text(result: FoundBatch) -> str:
    """The largest batch that fits, and how that was determined."""
    trials = ", ".join(f"{size} {'fits' if fits else 'does not fit'}" for size, fits in result.trials)
    how = f"confirmed by {len(result.trials)} trials: {trials}" if result.confirmed else "predicted only, not tried"
    more = " or more (end of the search)" if result.predicted.at_end else ""
    peak = gib_text(result.predicted.peak_bytes)
    where = f" on each of {result.gpus} GPUs with {result.strategy}" if result.strategy else ""
    text = f"Largest micro-batch in {result.precision}{where}: {result.batch}{more} (predicted peak {peak} GiB; {how})"
    if result.recomputed is not None:
        text += f"; with recompute=cheap: {result.recomputed.batch} (predicted only)"
    return text


def batch_data(result: FoundBatch) -> dict[str, Any]:
    """The largest batch that fits, as plain values."""
    return {
        "precision": result.precision,
        "strategy": result.strategy or None,
        "gpus": result.gpus,
        "batch": result.batch,
        "peak_bytes": result.predicted.peak_bytes,
        "confirmed": result.confirmed,
        "trials": [{"batch": size, "fits": fits} for size, fits in result.trials],
        "batch_with_recompute": None if result.recomputed is None else result.recomputed.batch,
    }
