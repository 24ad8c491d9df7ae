"""Does it fit, on how many GPUs, at which batch: the answers of `halfstep plan`.

The global batch is what training sees, so it is held fixed: on N GPUs each takes a share of it, in as many micro-batches as
are asked for. The smallest N is told for that; with more micro-batches fewer GPUs do, as long as one of them fits.
Every answer names what decides it, because the remedies differ: activations shrink with 16-bit compute, smaller
micro-batches and checkpointing, while model state shrinks only by sharding it or by holding it in fewer bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.backends.context import RunContext
from halfstep.errors import SettingError
from halfstep.jobs.job import Job
from halfstep.planning.batches import look_at_data
from halfstep.planning.capacity import Capacity, capacity_of
from halfstep.planning.estimator import Estimate, Estimator
from halfstep.planning.ledger import CAUSES
from halfstep.planning.sharding import STRATEGIES, Layout, layout_of, per_gpu
from halfstep.planning.trace import StepOptions
from halfstep.precision.policy import Policy

__all__ = ["DEFAULT_PRECISIONS", "STATE_CAUSES", "Answer", "Entry", "Plan", "plan"]

DEFAULT_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-lean", "bf16-lean,states=8bit")
STATE_CAUSES = ("weights", "master", "states", "average")  # with the gradients: model state
MOST_GPUS = 4096


@dataclass(frozen=True)
class Answer:
    """The smallest number of GPUs for one strategy."""

    strategy: str
    num_gpus: int | None  # None: no number of GPUs is enough
    micro_batch: int
    need_bytes: int  # of tensors, on each of them
    decides: str  # the cause that keeps it from fewer


@dataclass(frozen=True)
class Entry:
    """One precision: the step at the asked batch on one GPU, and the answers."""

    precision: str
    batch: int  # of an update, over all GPUs and micro-batches
    estimate: Estimate  # of one GPU that takes a whole micro-batch
    state_bytes: int  # weights, master, states and whole gradients
    fits: bool | None  # on one GPU at once; None where no memory size is known
    answers: tuple[Answer, ...] = ()
    largest: Estimate | None = None  # micro-batch that fits on one GPU

    @property
    def peak_bytes(self) -> int:
        """Predicted max_memory_allocated of a step on one GPU that takes each micro-batch whole."""
        return self.estimate.peak_bytes

    @property
    def min_gpus(self) -> int | None:
        """The smallest number over all strategies, preferring the simplest."""
        found = [a.num_gpus for a in self.answers if a.num_gpus is not None]
        return min(found) if found else None

    @property
    def accumulate(self) -> int | None:
        """Micro-batches to reach the whole batch on one GPU."""
        return None if self.largest is None else -(-self.batch // self.largest.batch)


@dataclass(frozen=True)
class Plan:
    """Everything `halfstep plan` found."""

    job: str
    batch: int
    entries: tuple[Entry, ...]
    capacity: Capacity | None
    gpus: int | None  # how many there are at the most; None: as many as it takes
    notes: tuple[str, ...]
    seconds: float
    accumulate: int = 1  # micro-batches of an update


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
    name: str = "",
) -> Plan:
    """Predict the memory of one training step of `job` in each precision, and where it fits.

    `batch` is the global batch, made of `accumulate` micro-batches. `gpu` names a GPU, `memory` gives its size instead; without both it is this machine's GPU, if
    there is one. `gpus` is how many there are at the most.
    """
    start = time.perf_counter()
    _check(batch, gpus, accumulate)
    capacity = capacity_of(gpu, memory)
    policies = [Policy.parse(p) if isinstance(p, str) else p for p in precision]
    batches = look_at_data(job, RunContext())
    batch = batches.size * accumulate if batches.size else batch
    notes = [*batches.notes, *(capacity.notes if capacity is not None else ())]
    entries = []
    left_out: dict[str, list[str]] = {}  # why -> which precisions
    for policy in dict.fromkeys(policies):
        if policy.compute == "fp8":
            raise SettingError("precision fp8 is named but not built yet, so there is nothing to plan. Use bf16-lean.")
        room = None if capacity is None else capacity.usable_bytes
        estimator = Estimator(job, policy, options=StepOptions(accumulate, ema), batches=batches, room=room)
        try:
            entries.append(_entry(estimator, batch, capacity, gpus))
        except SettingError as error:
            if precision is not DEFAULT_PRECISIONS or policy.params == "fp32":
                raise
            left_out.setdefault(str(error), []).append(
                str(policy)
            )  # nobody asked for it, and the others can be planned
            continue
        notes += [n for n in entries[-1].estimate.notes if n not in notes]
    notes += [f"Left out: {' and '.join(names)}. {why}" for why, names in left_out.items()]
    if capacity is None:
        notes.append(
            "No memory size is known: this machine has no GPU and none was named. Give --gpu A100 or --memory 80GiB to "
            "learn whether it fits and on how many GPUs; the peaks themselves depend on it only by transforms, if there are any."
        )
    notes += _story(entries)
    return Plan(
        name or job.name or "the job",
        batch,
        tuple(entries),
        capacity,
        gpus,
        tuple(notes),
        time.perf_counter() - start,
        accumulate,
    )


def _check(batch: int, gpus: int | None, accumulate: int) -> None:
    for what, value in (("batch", batch), ("gpus", gpus), ("accumulate", accumulate)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingError(f"{what}={value!r} must be a whole number, 1 or more.")
    if accumulate > batch:
        raise SettingError(f"A batch of {batch} cannot be made of accumulate={accumulate} micro-batches.")


def _entry(estimator: Estimator, batch: int, capacity: Capacity | None, gpus: int | None) -> Entry:
    micro = -(-batch // estimator.options.accumulate)
    estimate = estimator.at(micro)
    traced = estimator.trace(micro)
    layout = layout_of(estimator.policy, traced.num_trainable, traced.unit_params, estimator.options.accumulate)
    held = sum(estimate.peak.breakdown.get(cause, 0) for cause in STATE_CAUSES)
    state = held + layout.num_params * layout.grad_bytes
    if capacity is None:
        return Entry(estimate.precision, batch, estimate, state, None)
    usable = capacity.usable_bytes
    fits = max(estimate.need_bytes, estimate.build_bytes) <= usable
    if estimator.batches.fixed:
        return Entry(estimate.precision, batch, estimate, state, fits)
    largest = _largest(estimator, usable, micro)
    answers = tuple(_answer(estimator, layout, strategy, micro, usable, gpus) for strategy in STRATEGIES)
    return Entry(estimate.precision, batch, estimate, state, fits, answers, largest)


def _largest(estimator: Estimator, usable: int, micro: int) -> Estimate | None:
    """The largest micro-batch of one GPU; where that is only a part of the batch, with the gradients that accumulation holds."""
    found = estimator.largest(usable, micro)
    policy, options = estimator.policy, estimator.options
    if found is None or found.batch >= micro or policy.grads_format(options.accumulate) == policy.grads_format(2):
        return found
    summing = Estimator(
        estimator.job, policy, options=StepOptions(2, options.ema), batches=estimator.batches, room=usable
    )
    return summing.largest(usable, found.batch)


def _answer(estimator: Estimator, layout: Layout, strategy: str, batch: int, usable: int, gpus: int | None) -> Answer:
    def need(num: int, *, checked: bool = False) -> dict[str, int]:
        micro = -(-batch // num)
        estimate = estimator.checked(micro) if checked else estimator.at(micro, trace=False)
        return per_gpu(estimate.least, layout, strategy, num)

    def fits(num: int, *, checked: bool = False) -> bool:
        return sum(need(num, checked=checked).values()) <= usable

    most = min(batch, MOST_GPUS) if gpus is None else gpus
    low, high = 0, 1
    while not fits(high):
        if high >= most:
            causes = need(high)
            return Answer(strategy, None, -(-batch // high), sum(causes.values()), _decides(causes))
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    while not fits(high, checked=True) and high < most:  # the line was a little low here
        high += 1
    causes = need(high)
    return Answer(
        strategy, high, -(-batch // high), sum(causes.values()), _decides(need(high - 1) if high > 1 else causes)
    )


def _decides(causes: dict[str, int]) -> str:
    """What takes the most: model state, communication buffers, or one cause of the step itself."""
    state = sum(causes.get(cause, 0) for cause in (*STATE_CAUSES, "gradients"))
    others = {cause: size for cause, size in causes.items() if cause not in {*STATE_CAUSES, "gradients"}}
    top = max(others, key=lambda cause: others[cause], default="")
    return "model state" if not top or state >= others[top] else top


def _story(entries: Sequence[Entry]) -> list[str]:
    """What mixed precision can and cannot do for the number of GPUs, in this job's own numbers."""
    by_name = {e.precision: e for e in entries}
    full, mixed = by_name.get("fp32"), by_name.get("bf16") or by_name.get("fp16")
    if full is None or mixed is None:
        return []
    # Not the activations of both: the two peaks may be at different moments, and what is an activation at one is scratch
    # at the other.
    before, after = (
        sum(size for cause, size in e.estimate.peak.breakdown.items() if cause not in (*STATE_CAUSES, "gradients"))
        for e in (full, mixed)
    )
    told = [
        f"fp32 and {mixed.precision} hold the same {full.state_bytes / 2**30:.2f} GiB of weights, gradients and optimizer states. Autocast "
        f"changes only what is held beside them, activations above all: at the fullest moment {before / 2**30:.2f} GiB in fp32 and "
        f"{after / 2**30:.2f} in {mixed.precision}. So only where that decides can it lower the number of GPUs."
    ]
    counts = {e.precision: a.num_gpus for e in entries for a in e.answers if a.strategy == "ddp"}
    before_count, after_count = counts.get(full.precision), counts.get(mixed.precision)
    if before_count is not None and after_count is not None:
        listed = ", ".join(f"{name} {'none' if count is None else count}" for name, count in counts.items())
        what = (
            "activations decided, and they shrank"
            if after_count < before_count
            else "no fewer by autocast, at this batch and on this GPU"
        )
        told.append(f"GPUs with everything on every one of them: {listed}: {what}.")
    return told


assert set(STATE_CAUSES) <= set(CAUSES)
