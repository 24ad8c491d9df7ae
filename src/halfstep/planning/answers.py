"""Does it fit, on how many GPUs, at which batch: the answers of `halfstep plan`.

The global batch is what training depends on, so it is fixed: each of N GPUs gets a share of it, in the requested number of
micro-batches. The answer is the smallest N for that; with more micro-batches fewer GPUs are enough, as long as one
micro-batch fits. Every answer names the deciding category, because the remedies differ: activations shrink with 16-bit
compute, smaller micro-batches and checkpointing, while model state shrinks only by sharding or smaller dtypes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from halfstep.backends.context import RunContext
from halfstep.engine.recompute import CHEAP
from halfstep.errors import HalfstepError, SettingError
from halfstep.hardware.tables import html_table
from halfstep.hardware.units import gib_text
from halfstep.jobs.job import Job
from halfstep.planning.batches import look_at_data
from halfstep.planning.capacity import Capacity, capacity_of
from halfstep.planning.estimator import Estimate, Estimator
from halfstep.planning.ranks.counts import STATE_CATEGORIES, Answer, Fleet, fewest, on_exactly, parse_strategies
from halfstep.planning.ranks.hours import Budget, Rate
from halfstep.planning.sharding import layout_of
from halfstep.planning.trace import StepOptions
from halfstep.precision.policy import Policy

__all__ = ["DEFAULT_PRECISIONS", "STATE_CATEGORIES", "Answer", "Entry", "Plan", "plan"]

DEFAULT_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-lean", "bf16-lean,states=8bit")


@dataclass(frozen=True)
class Entry:
    """One precision: the step at the requested batch on one GPU, and the answers."""

    precision: str
    batch: int  # of an update, over all GPUs and micro-batches
    estimate: Estimate  # of one GPU that runs a whole micro-batch
    state_bytes: int  # weights, master, states and all gradients
    fits: bool | None  # on one GPU; None if no memory size is known
    answers: tuple[Answer, ...] = ()
    exact: tuple[Answer, ...] = ()  # on exactly the requested number of GPUs
    largest: Estimate | None = None  # micro-batch that fits on one GPU
    recomputed: Estimate | None = None  # the same step with recompute="cheap", if it fits on one GPU only with that

    @property
    def peak_bytes(self) -> int:
        """Predicted max_memory_allocated of a step on one GPU that runs whole micro-batches."""
        return self.estimate.peak_bytes

    @property
    def min_gpus(self) -> int | None:
        """The smallest number over all strategies, preferring the simplest."""
        return min((a.num_gpus for a in self.answers if a.num_gpus is not None), default=None)

    @property
    def accumulate(self) -> int | None:
        """Micro-batches of the largest size that make up the batch on one GPU."""
        return None if self.largest is None else -(-self.batch // self.largest.batch)


@dataclass(frozen=True)
class Plan:
    """The result of `halfstep plan`."""

    job: str
    batch: int
    entries: tuple[Entry, ...]
    capacity: Capacity | None
    gpus: int | None  # at most this many; None: no limit
    notes: tuple[str, ...]
    seconds: float
    accumulate: int = 1  # micro-batches per update
    recompute: str | float | None = None
    bandwidth: float | None = None  # bus bandwidth between the GPUs, in bytes per second
    budget: Budget | None = None  # what GPU-hours are for
    rates: Mapping[str, Rate] = field(default_factory=dict)  # measured ones, by precision

    def _repr_html_(self) -> str:
        cells = [
            (
                entry.precision,
                gib_text(entry.peak_bytes),
                gib_text(entry.state_bytes),
                {True: "fits", False: "too large", None: "-"}[entry.fits],
                "-" if entry.min_gpus is None else str(entry.min_gpus),
            )
            for entry in self.entries
        ]
        title = f"{self.job}, batch {self.batch}: predicted GiB of one training step"
        headings = ("precision", "peak", "model state", "one GPU", "min GPUs")
        return html_table(headings, cells, below=[title, *self.notes])


def plan(
    job: Job,
    batch: int,
    *,
    precision: Sequence[str | Policy] = DEFAULT_PRECISIONS,
    gpu: str | None = None,
    memory: str | int | None = None,
    gpus: int | None = None,
    accumulate: int = 1,
    ema: bool = False,
    recompute: str | float | None = None,
    strategies: Sequence[str] = (),
    bandwidth: float | None = None,
    name: str = "",
) -> Plan:
    """Predict the memory of one training step of `job` in each precision, and where it fits.

    `batch` is the global batch, in `accumulate` micro-batches. `gpu` names a GPU, and `memory` gives its size instead;
    without both it is this machine's GPU, if there is one. `gpus` is the largest number of GPUs to consider. `recompute` is
    the Engine's; without it, a step that does not fit on one GPU is also tried with recompute="cheap". `strategies` are
    those to answer for, by default all; "hsdp:16" shards over groups of 16 GPUs. `bandwidth` is in bytes per second.
    """
    start = time.perf_counter()
    _check(batch, gpus, accumulate)
    fleet = Fleet(gpus, *parse_strategies(strategies))
    if bandwidth is not None and not bandwidth > 0:
        raise SettingError(f"bandwidth={bandwidth!r} must be above 0, in bytes per second.")
    capacity = capacity_of(gpu, memory)
    policies = [Policy.parse(p) if isinstance(p, str) else p for p in precision]
    batches = look_at_data(job, RunContext())
    batch = batches.size * accumulate if batches.size else batch
    notes = [*batches.notes, *(capacity.notes if capacity is not None else ())]
    entries = []
    left_out: dict[str, list[str]] = {}  # reason -> precisions
    for policy in dict.fromkeys(policies):
        if policy.compute == "fp8":
            raise SettingError("precision fp8 is not implemented yet, so there is nothing to plan. Use bf16-lean.")
        usable = None if capacity is None else capacity.usable_bytes
        options = StepOptions(accumulate, ema, recompute)
        estimator = Estimator(job, policy, options=options, batches=batches, usable_bytes=usable)
        try:
            entries.append(_entry(estimator, batch, capacity, fleet))
        except SettingError as error:
            if precision is not DEFAULT_PRECISIONS or policy.params == "fp32":
                raise
            left_out.setdefault(str(error), []).append(str(policy))  # a default that was not requested: plan the others
            continue
        notes += [n for n in entries[-1].estimate.notes if n not in notes]
    notes += [f"Omitted: {' and '.join(names)}. {reason}" for reason, names in left_out.items()]
    if capacity is None:
        notes.append(
            "The GPU's memory is unknown: this machine has no GPU and none was named. Add --gpu A100 or --memory 80GiB to see "
            "whether the step fits and on how many GPUs. The peaks depend on it only through transforms, if there are any."
        )
    notes += _mixed_precision_notes(entries)
    notes += [_recompute_note(entry) for entry in entries if entry.recomputed is not None]
    notes += _rejected_notes(entries)
    return Plan(
        name or job.name or "the job",
        batch,
        tuple(entries),
        capacity,
        gpus,
        tuple(notes),
        time.perf_counter() - start,
        accumulate,
        recompute,
        bandwidth,
    )


def _rejected_notes(entries: Sequence[Entry]) -> list[str]:
    """The combinations of precision and strategy that cannot be trained, by reason."""
    rejected: dict[str, dict[str, list[str]]] = {}  # reason -> precision -> strategies
    for entry in entries:
        for answer in (*entry.answers, *entry.exact):
            if answer.rejected:
                names = rejected.setdefault(answer.rejected, {}).setdefault(entry.precision, [])
                if answer.strategy not in names:
                    names.append(answer.strategy)
    return [
        f"Rejected: {', '.join(strategies)} with {precision}: {reason}."
        for reason, by_precision in rejected.items()
        for precision, strategies in by_precision.items()
    ]


def _check(batch: int, gpus: int | None, accumulate: int) -> None:
    for name, value in (("batch", batch), ("gpus", gpus), ("accumulate", accumulate)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingError(f"{name}={value!r} must be an integer of 1 or more.")
    if accumulate > batch:
        raise SettingError(
            f"A batch of {batch} cannot be divided into accumulate={accumulate} micro-batches; use at most {batch}."
        )


def _entry(estimator: Estimator, batch: int, capacity: Capacity | None, fleet: Fleet) -> Entry:
    micro = -(-batch // estimator.options.accumulate)
    estimate = estimator.at(micro)
    traced = estimator.trace(micro)
    layout = layout_of(
        estimator.policy, traced.parts, traced.units, traced.buckets, estimator.options.accumulate, traced.compressed
    )
    state = sum(estimate.peak.breakdown.get(category, 0) for category in STATE_CATEGORIES)
    state += layout.grad_bytes
    if capacity is None:
        return Entry(estimate.precision, batch, estimate, state, None)
    usable = capacity.usable_bytes
    fits = _fits(estimate, usable)
    recomputed = None if fits else _recomputed(estimator, micro, usable)
    if estimator.batches.fixed:
        return Entry(estimate.precision, batch, estimate, state, fits, recomputed=recomputed)
    largest = _largest(estimator, usable, micro)
    settings = (micro, usable, fleet)
    answers = tuple(fewest(estimator, layout, strategy, *settings) for strategy in fleet.strategies)
    exact: tuple[Answer, ...] = ()
    if fleet.gpus is not None and fleet.gpus > 1:
        exact = tuple(on_exactly(estimator, layout, strategy, *settings) for strategy in fleet.strategies)
    return Entry(estimate.precision, batch, estimate, state, fits, answers, exact, largest, recomputed)


def _fits(estimate: Estimate, usable: int) -> bool:
    return max(estimate.need_bytes, estimate.build_bytes) <= usable


def _recomputed(estimator: Estimator, micro: int, usable: int) -> Estimate | None:
    """The step with recompute="cheap", if it was not requested already and the step fits with it."""
    if estimator.options.recompute is not None or estimator.at(micro).build_bytes > usable:
        return None
    try:
        estimate = estimator.recomputing().at(micro)
    except HalfstepError:  # the model has no blocks to recompute, for example; nobody asked for it
        return None
    return estimate if _fits(estimate, usable) else None


def _recompute_note(entry: Entry) -> str:
    assert entry.recomputed is not None
    return (
        f"{entry.precision} fits on one GPU with recompute={CHEAP!r}: {gib_text(entry.recomputed.peak_bytes)} GiB instead of "
        f"{gib_text(entry.peak_bytes)}. Activation functions and normalisation are then computed again in the backward pass."
    )


def _largest(estimator: Estimator, usable: int, micro: int) -> Estimate | None:
    """The largest micro-batch of one GPU; if that is only a part of the batch, with the gradients of accumulation."""
    largest = estimator.largest(usable, micro)
    policy, options = estimator.policy, estimator.options
    if largest is None or largest.batch >= micro or policy.grads_format(options.accumulate) == policy.grads_format(2):
        return largest
    accumulating = Estimator(
        estimator.job, policy, options=replace(options, accumulate=2), batches=estimator.batches, usable_bytes=usable
    )
    return accumulating.largest(usable, largest.batch)


def _mixed_precision_notes(entries: Sequence[Entry]) -> list[str]:
    """What mixed precision changes and does not change about the number of GPUs, for this job."""
    by_name = {e.precision: e for e in entries}
    full, mixed = by_name.get("fp32"), by_name.get("bf16") or by_name.get("fp16")
    if full is None or mixed is None:
        return []
    # Not the activations of both: the two peaks may occur at different moments, and what is an activation at one is a
    # temporary at the other.
    before, after = (
        sum(size for name, size in e.estimate.peak.breakdown.items() if name not in (*STATE_CATEGORIES, "gradients"))
        for e in (full, mixed)
    )
    notes = [
        f"fp32 and {mixed.precision} have the same {gib_text(full.state_bytes)} GiB of weights, gradients and optimizer states. Autocast "
        f"changes only the rest, mostly activations: {gib_text(before)} GiB in fp32 and {gib_text(after)} in {mixed.precision} at the peak. "
        "So it can reduce the number of GPUs only where that part decides."
    ]
    counts = {e.precision: a.num_gpus for e in entries for a in e.answers if a.strategy == "ddp"}
    before_count, after_count = counts.get(full.precision), counts.get(mixed.precision)
    if before_count is not None and after_count is not None:
        listed = ", ".join(f"{name} {'none' if count is None else count}" for name, count in counts.items())
        fewer = (
            "Activations decided, and autocast makes them smaller"
            if after_count < before_count
            else "Autocast does not reduce the number here"
        )
        notes.append(f"GPUs with a full copy on each (ddp): {listed}. {fewer}.")
    return notes
