"""The parts of a plan about several GPUs and about hours: tables for text and HTML, and plain data.

Rates are measured or the user's, memory and communication are predicted; no table mixes the two without a label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halfstep.hardware.units import gib_text, seconds_text

if TYPE_CHECKING:
    from halfstep.planning import Answer, Entry, Plan

__all__ = ["answer_data", "hours_data", "hours_table", "rank_tables"]

TableParts = tuple[str, list[str], list[list[str]]]  # title, headings, rows


def rank_tables(plan: Plan) -> list[TableParts]:
    """Memory on the requested number of GPUs, and the bytes that each GPU sends."""
    tables = []
    if any(entry.exact for entry in plan.entries):
        title = f"On all {plan.gpus} GPUs: examples per GPU, and memory of each in GiB"
        tables.append((title, _head(plan), [[e.precision, *map(_memory, e.exact)] for e in plan.entries]))
    sent = [(e, e.exact or e.answers) for e in plan.entries]
    if any(a.traffic is not None and a.traffic.total for _, answers in sent for a in answers):
        rows = [[e.precision, *(_sent(a, plan) for a in answers)] for e, answers in sent]
        tables.append((_sent_title(plan), _head(plan), rows))
    return tables


def _head(plan: Plan) -> list[str]:
    return ["precision", *(answer.strategy for answer in plan.entries[0].answers)]


def _memory(answer: Answer) -> str:
    if answer.rejected:
        return "-"
    return f"{answer.micro_batch}, {gib_text(answer.need_bytes)}{'' if answer.fits else ' (too large)'}"


def _sent_title(plan: Plan) -> str:
    where = f"on {plan.gpus} GPUs" if any(e.exact for e in plan.entries) else "on the minimum number of GPUs"
    time = ""
    if plan.bandwidth is not None:
        time = f", and seconds at {plan.bandwidth / 1e9:g} GB/s if nothing overlaps"
    return f"Communication, predicted: GB that each GPU sends per update {where}{time}"


def _sent(answer: Answer, plan: Plan) -> str:
    if answer.traffic is None:
        return "-"
    text = f"{answer.traffic.total / 1e9:.3g}"
    if answer.traffic.compressed:
        text += f" (compressed: {answer.traffic.compressed / 1e9:.3g})"
    return text if plan.bandwidth is None else f"{text}, {seconds_text(answer.traffic.seconds(plan.bandwidth))}"


def hours_table(plan: Plan) -> TableParts:
    """GPU-hours at measured rates, and hours on the number of GPUs of the plan."""
    budget = plan.budget
    assert budget is not None
    head = ["precision", "examples/s per GPU", "GPU-hours", "hours"]
    head += [] if budget.price is None else ["cost"]
    rows = []
    for entry in plan.entries:
        rate = plan.rates.get(entry.precision)
        if rate is None:
            rows.append([entry.precision, *["-"] * (len(head) - 1), "no rate"])
            continue
        speed = rate.examples_per_second
        hours, cost, num = budget.gpu_hours(speed), budget.cost(speed), _num_gpus(plan, entry)
        wall = "-" if num is None else f"{hours / num:,.1f} on {num}"
        row = [entry.precision, f"{speed:,.1f}", f"{hours:,.1f}", wall, *([] if cost is None else [f"{cost:,.2f}"])]
        rows.append([*row, rate.source])
    title = (
        f"GPU-hours for {budget.epochs:g} epochs of {budget.examples:,} examples; hours if each GPU keeps its rate "
        "(communication and smaller micro-batches are not included)"
    )
    return title, [*head, "rate"], rows


def _num_gpus(plan: Plan, entry: Entry) -> int | None:
    """The GPUs to divide the hours by: those requested, or the smallest number."""
    return plan.gpus if any(answer.fits for answer in entry.exact) else entry.min_gpus


def hours_data(plan: Plan) -> dict[str, Any]:
    """GPU-hours as plain values, if they were requested."""
    budget = plan.budget
    if budget is None:
        return {}
    rows = {
        precision: {
            "examples_per_second": rate.examples_per_second,
            "source": rate.source,
            "gpu_hours": budget.gpu_hours(rate.examples_per_second),
            "cost": budget.cost(rate.examples_per_second),
        }
        for precision, rate in plan.rates.items()
    }
    return {"hours": {"epochs": budget.epochs, "examples": budget.examples, "price": budget.price, "precisions": rows}}


def answer_data(answer: Answer) -> dict[str, Any]:
    """One strategy as plain values."""
    sent = answer.traffic
    return {
        "strategy": answer.strategy,
        "gpus": answer.num_gpus,
        "micro_batch": answer.micro_batch,
        "bytes_per_gpu": answer.need_bytes,
        "decides": answer.decides,
        "fits": answer.fits,
        "rejected": answer.rejected or None,
        "sent_bytes": None
        if sent is None
        else {
            "all_gather": sent.all_gather,
            "reduce_scatter": sent.reduce_scatter,
            "all_reduce": sent.all_reduce,
            "total": sent.total,
        }
        | ({"compressed": sent.compressed} if sent.compressed else {}),
    }
