"""The largest batch that fits, predicted by the plan and confirmed by trial.

Doubling until it fails needs a dozen trials, and each failure leaves a fragmented allocator. The plan is accurate to a
few percent, so the search starts there and ends after a handful of trials: up while it fits, down while it does not,
then bisection. Running out of memory is a normal result; everything a trial allocated is freed before the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from halfstep.engine.recompute import CHEAP
from halfstep.errors import HalfstepError, SettingError
from halfstep.events import log_info
from halfstep.hardware.probe import probe
from halfstep.hardware.units import bytes_text
from halfstep.jobs.job import Job
from halfstep.planning.capacity import FRAGMENTATION, Capacity, parse_memory
from halfstep.planning.estimator import Estimate, Estimator
from halfstep.planning.measured import measure_step, quiet_gpu
from halfstep.planning.ranks.counts import largest_on_each
from halfstep.planning.trace import StepOptions
from halfstep.precision.choice import resolve
from halfstep.precision.policy import Policy

__all__ = ["FoundBatch", "Trial", "find_batch_size", "search"]

_START = 8
_STEP = 32  # one trial up or down is 1/32 of the batch
_MAX_TRIALS = 8


class Trial(NamedTuple):
    """One batch that was tried on this machine."""

    batch: int
    fits: bool


@dataclass(frozen=True)
class FoundBatch:
    """The largest batch, with the trials that confirm it."""

    batch: int
    precision: str
    predicted: Estimate
    confirmed: bool  # by a trial on this machine; otherwise only predicted
    trials: tuple[Trial, ...] = ()
    recomputed: Estimate | None = None  # the largest with recompute="cheap", predicted, if that is larger
    strategy: str = ""  # on each of `gpus` GPUs; otherwise on one
    gpus: int = 1


def find_batch_size(
    job: Job,
    precision: str | Policy = "auto",
    *,
    memory: str | int | None = None,
    accumulate: int = 1,
    ema: bool = False,
    recompute: str | float | None = None,
    strategy: str | None = None,
    gpus: int | None = None,
) -> FoundBatch:
    """The largest micro-batch of `job` that fits: on this machine's GPU by trial, or in `memory` by prediction only.

    With `strategy` and `gpus` it is that of each of several GPUs, by prediction. Without them and without `recompute`, the
    result also has the prediction with recompute="cheap".
    """
    _check_strategy(strategy, gpus, memory)
    policy, notes = resolve(precision, probe())
    if memory is None or precision == "auto":  # otherwise the notes are about a machine that the answer is not for
        for note in notes:
            log_info(note)
    options = StepOptions(accumulate, ema, recompute)
    if memory is None and not torch.cuda.is_available():
        raise SettingError(
            "find_batch_size() tries batches on a GPU, and torch sees none here. Pass memory='80GiB' (--memory 80GiB) for a "
            "prediction for a GPU of that size."
        )
    if memory is not None:
        size = memory if isinstance(memory, int) else parse_memory(memory)
        limit = Capacity("the specified memory", size).usable_bytes
    else:
        free, _ = torch.cuda.mem_get_info()
        limit = int((free + torch.cuda.memory_reserved()) / (1 + FRAGMENTATION))
    estimator = Estimator(job, policy, options=options, usable_bytes=limit)
    if estimator.batches.fixed:
        raise SettingError(
            f"{job.describe('data')} ignores batch_size and always yields the same batches, so there is no largest batch to find. "
            "Give it an argument named batch_size, and yield batches of that many examples."
        )
    if strategy is not None and gpus is not None:
        estimate = largest_on_each(estimator, strategy, gpus, limit)
        return FoundBatch(estimate.batch, str(policy), estimate, confirmed=False, strategy=strategy, gpus=gpus)
    predicted = estimator.largest(limit, _START)
    recomputed = _recomputed(estimator, limit, predicted)
    if predicted is None:
        one = estimator.at(1)
        with_it = "" if recomputed is None else f" With recompute={CHEAP!r} a batch of {recomputed.batch} fits."
        raise SettingError(
            f"Not even one example fits in {policy}: a step needs {bytes_text(one.need_bytes)} and {bytes_text(limit)} are usable.{with_it} "
            "Use a leaner precision, activation checkpointing, or shard the model over several GPUs."
        )
    if memory is not None:
        return FoundBatch(predicted.batch, str(policy), predicted, confirmed=False, recomputed=recomputed)
    batch, trials = search(predicted.batch, lambda size: _fits(job, policy, size, options))
    if batch == 0:
        raise SettingError(
            f"Every trial from batch {predicted.batch} down to 1 ran out of memory. Check whether another process uses the GPU."
        )
    if recomputed is not None and recomputed.batch <= batch:
        recomputed = None
    estimate = estimator.at(batch, trace=False)
    return FoundBatch(batch, str(policy), estimate, confirmed=True, trials=trials, recomputed=recomputed)


def _check_strategy(strategy: str | None, gpus: int | None, memory: str | int | None) -> None:
    if (strategy is None) != (gpus is None):
        missing = "the number of GPUs (gpus=N, --gpus N)" if gpus is None else "how they train (strategy=, --strategy)"
        raise SettingError(f"The largest micro-batch on several GPUs also needs {missing}.")
    if gpus is not None and gpus < 1:
        raise SettingError(f"gpus={gpus} must be 1 or more.")
    if strategy is not None and memory is None:
        raise SettingError(
            f"strategy={strategy!r} is planned, not tried: one process cannot run it. Pass memory='80GiB' (--memory 80GiB)."
        )


def _recomputed(estimator: Estimator, limit: int, without: Estimate | None) -> Estimate | None:
    """The largest batch with recompute="cheap", if that was not requested already and allows a larger one."""
    if estimator.options.recompute is not None or (without is not None and without.at_end):
        return None
    smallest = _START if without is None else without.batch
    try:
        largest = estimator.recomputing().largest(limit, smallest)
    except HalfstepError:  # the model has no blocks to recompute, for example; nobody asked for it
        return None
    return largest if largest is None or without is None or largest.batch > without.batch else None


def search(start: int, fits: Callable[[int], bool]) -> tuple[int, tuple[Trial, ...]]:
    """The largest batch that `fits`, to within 1/32, searched from a good guess, and the trials; 0 if none fits."""
    trials: list[Trial] = []

    def attempt(size: int) -> bool:
        trials.append(Trial(size, fits(size)))
        return trials[-1].fits

    step = max(1, start // _STEP)
    good, bad = (start, None) if attempt(start) else (0, start)
    while bad is None and len(trials) < _MAX_TRIALS:
        size = good + step
        good, bad = (size, None) if attempt(size) else (good, size)
    down = step
    while good == 0 and bad is not None and bad > 1:
        size = max(1, bad - down)
        good, bad = (size, bad) if attempt(size) else (0, size)
        down *= 2
    while bad is not None and good and bad - good > step and len(trials) < _MAX_TRIALS + 4:
        size = (good + bad) // 2
        good, bad = (size, bad) if attempt(size) else (good, size)
    return good, tuple(trials)


def _fits(job: Job, policy: Policy, batch: int, options: StepOptions) -> bool:
    try:
        measure_step(job, policy, batch, options)
    except torch.OutOfMemoryError:
        fitted = False
    else:
        return True
    # Outside the handler: the exception keeps the frames alive, and they keep the tensors.
    with quiet_gpu():
        return fitted
