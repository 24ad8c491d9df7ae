"""Shows a plan: as text in a terminal, and as plain data for JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.planning import Entry, FoundBatch, MeasuredStep, Plan

__all__ = [
    "as_data",
    "as_text",
    "at_once",
    "found_data",
    "found_text",
    "grouped",
    "largest_text",
    "verified_data",
    "verified_text",
]

_TOP = 10  # modules named
_ORDER = (
    "weights", "master", "gradients", "states", "average", "activations", "cast cache", "temporaries", "batch", "buffers",
    "workspaces", "transforms", "communication", "rounding",
)  # fmt: skip


def as_text(plan: Plan, width: int = 100) -> str:
    """The whole plan for a terminal."""
    parts = [_title(plan), _summary(plan)]
    if any(entry.answers for entry in plan.entries):
        parts.append(_gpus(plan))
    parts += [_causes(plan), _modules(plan.entries[0]), _uncertainty(plan)]
    notes = [textwrap.fill(note, width, initial_indent="- ", subsequent_indent="  ") for note in plan.notes]
    parts.append("\n".join(notes))
    return "\n\n".join(part for part in parts if part)


def gib(num_bytes: float) -> str:
    """A size in GiB; small ones with more digits."""
    size = num_bytes / 2**30
    return f"{size:.2f}" if size >= 0.1 or size == 0 else f"{size:.4f}"


def _title(plan: Plan) -> str:
    where = ""
    if plan.capacity is not None:
        many = f"{plan.gpus} x " if plan.gpus else ""
        where = f" on {many}{plan.capacity.name} ({gib(plan.capacity.total_bytes)} GiB, of which tensors can use {gib(plan.capacity.usable_bytes)})"
    parts = f" in {plan.accumulate} micro-batches" if plan.accumulate > 1 else ""
    return f"Plan for {plan.job}, batch {plan.batch}{parts}{where}\nPredicted in {plan.seconds:.1f} s without running it; GiB throughout."


def _summary(plan: Plan) -> str:
    head = [
        "precision",
        "peak",
        "model state",
        "activations",
        "when",
        "on one GPU",
        "fewest GPUs",
        "largest micro-batch",
    ]
    rows = []
    for entry in plan.entries:
        peak = entry.estimate.peak
        best = next((a for a in entry.answers if a.num_gpus is not None and a.num_gpus == entry.min_gpus), None)
        fewest = (
            "none" if entry.answers and best is None else "-" if best is None else f"{best.num_gpus} ({best.strategy})"
        )
        largest = "-" if not entry.answers else "none" if entry.largest is None else largest_text(entry)
        fits = {True: "fits", False: "too large", None: "-"}[entry.fits]
        activations = gib(peak.breakdown.get("activations", 0))
        rows.append(
            [
                entry.precision,
                gib(peak.allocated),
                gib(entry.state_bytes),
                activations,
                peak.moment,
                fits,
                fewest,
                largest,
            ]
        )
    return table(head, rows)


def largest_text(entry: Entry) -> str:
    """The largest micro-batch and how many make the batch."""
    if entry.largest is None:
        return "-"
    return f"{entry.largest.batch}{' or more' if entry.largest.at_end else ''} x {entry.accumulate}"


def _gpus(plan: Plan) -> str:
    strategies = [a.strategy for a in plan.entries[0].answers]
    rows = []
    for entry in plan.entries:
        cells = [
            f"none ({a.decides})" if a.num_gpus is None else f"{a.num_gpus} x {a.micro_batch} ({a.decides})"
            for a in entry.answers
        ]
        rows.append([entry.precision, *cells])
    asked = f"the fewest of {plan.gpus} GPUs" if plan.gpus else "the fewest GPUs"
    return f"By strategy: {asked} x examples on each{at_once(plan)} (what decides)\n" + table(
        ["precision", *strategies], rows
    )


def at_once(plan: Plan) -> str:
    """What is said of the examples on each GPU: all at once, or in the micro-batches that were asked for."""
    return ", without accumulation" if plan.accumulate == 1 else f" in each of {plan.accumulate} micro-batches"


def _causes(plan: Plan) -> str:
    seen = {cause for entry in plan.entries for cause in entry.estimate.peak.breakdown}
    causes = [cause for cause in _ORDER if cause in seen]
    rows = [[cause, *(gib(e.estimate.peak.breakdown.get(cause, 0)) for e in plan.entries)] for cause in causes]
    rows.append(["sum = peak", *(gib(e.peak_bytes) for e in plan.entries)])
    rows.append(["reserved by torch", *(gib(e.estimate.peak.reserved) for e in plan.entries)])
    return "At the fullest moment, by cause\n" + table(["cause", *(e.precision for e in plan.entries)], rows)


def _modules(entry: Entry) -> str:
    rows = [[name, str(count), gib(size)] for name, count, size in grouped(entry.estimate.peak.modules)[:_TOP]]
    if not rows:
        return ""
    return f"Activations by module in {entry.precision}, the largest {len(rows)} kinds\n" + table(
        ["module", "of them", "together"], rows
    )


def grouped(modules: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Modules that differ in numbers only, together: name with * for the numbers, how many, bytes; largest first."""
    groups: dict[str, tuple[int, int]] = {}
    for name, size in modules.items():
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "(outside any module)"
        count, total = groups.get(kind, (0, 0))
        groups[kind] = count + 1, total + size
    return sorted(((name, count, size) for name, (count, size) in groups.items()), key=lambda row: -row[2])


def _uncertainty(plan: Plan) -> str:
    lines = ["What is uncertain"]
    taken = {e.precision: e.estimate.peak.breakdown.get("workspaces", 0) for e in plan.entries}
    most = max(taken, key=lambda precision: taken[precision])
    lines.append(
        f"- workspaces ({gib(taken[most])} in {most}): cuDNN chooses its algorithms itself, by card and version"
    )
    for entry in plan.entries:
        extra = entry.estimate.peak_bytes - entry.estimate.need_bytes
        if extra > 0:
            lines.append(
                f"- transforms ({gib(extra)} more at the peak in {entry.precision}): in true fp32 cuDNN transforms whole images for some\n"
                "  convolutions where there is room, and a few more images can switch it on or off; TF32 and 16 bits were never seen\n"
                f"  to take that. Where there is none, torch takes another algorithm: {gib(entry.estimate.need_bytes)} are enough."
            )
    if plan.capacity is not None:
        lines.append(
            f"- CUDA context: {gib(plan.capacity.context_bytes)} taken off the GPU's memory, 0.4 to 0.7 by card and driver"
        )
        lines.append(
            f"- fragmentation: {plan.capacity.fragmentation:.0%} taken off; see 'reserved' above for the whole cache"
        )
        lines.append(f"- the GPU's memory: {plan.capacity.source}")
    return "\n".join(lines)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A plain table: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    lines.insert(1, "  " + "-" * (len(lines[0]) - 2))
    return "\n".join(lines)


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    capacity = plan.capacity
    return {
        "job": plan.job,
        "batch": plan.batch,
        "accumulate": plan.accumulate,
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
        "activations_by_module": dict(list(peak.modules.items())[:_TOP]),
        "phases": dict(peak.phases),
        "model_state_bytes": entry.state_bytes,
        "build_bytes": entry.estimate.build_bytes,
        "num_params": entry.estimate.num_params,
        "fits": entry.fits,
        "min_gpus": entry.min_gpus,
        "strategies": [
            {
                "strategy": a.strategy,
                "gpus": a.num_gpus,
                "micro_batch": a.micro_batch,
                "bytes_per_gpu": a.need_bytes,
                "decides": a.decides,
            }
            for a in entry.answers
        ],
        "largest_micro_batch": None if entry.largest is None else entry.largest.batch,
        "accumulate": entry.accumulate,
    }


def verified_text(rows: list[tuple[Entry, MeasuredStep]]) -> str:
    """Predicted beside measured."""
    cells = [
        [
            entry.precision,
            str(seen.batch),
            gib(entry.peak_bytes),
            gib(seen.peak_bytes),
            f"{seen.error(entry.estimate):+.1%}",
        ]
        for entry, seen in rows
    ]
    device = rows[0][1].device if rows else ""
    return f"Predicted and measured on {device}\n" + table(
        ["precision", "batch", "predicted", "measured", "error"], cells
    )


def verified_data(rows: list[tuple[Entry, MeasuredStep]]) -> list[dict[str, Any]]:
    """The same as plain values."""
    return [
        {
            "precision": entry.precision,
            "batch": seen.batch,
            "peak_bytes": entry.peak_bytes,
            "measured_bytes": seen.peak_bytes,
            "measured_reserved_bytes": seen.reserved_bytes,
            "error": seen.error(entry.estimate),
            "device": seen.device,
        }
        for entry, seen in rows
    ]


def found_text(found: FoundBatch) -> str:
    """The largest batch, and how it is known."""
    how = (
        f"confirmed by {len(found.trials)} trials: "
        + ", ".join(f"{size} {'fits' if ok else 'does not'}" for size, ok in found.trials)
        if found.confirmed
        else "by the plan alone; no trial was made"
    )
    more = " or more, where the search ends" if found.predicted.at_end else ""
    return f"Largest micro-batch in {found.precision}: {found.batch}{more} (predicted peak {gib(found.predicted.peak_bytes)} GiB; {how})"


def found_data(found: FoundBatch) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "precision": found.precision,
        "batch": found.batch,
        "peak_bytes": found.predicted.peak_bytes,
        "confirmed": found.confirmed,
        "trials": [{"batch": size, "fits": ok} for size, ok in found.trials],
    }
