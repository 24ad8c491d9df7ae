"""The largest batch that fits, found from the plan and confirmed by trial.

Doubling until it breaks takes a dozen trials and leaves a broken allocator behind each. The plan is within a few
percent, so the search starts there and ends after a handful of steps: up while it fits, down while it does not, then
between the two. Running out of memory is an answer like another; everything of a trial is dropped before the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from halfstep.errors import SettingError
from halfstep.events import say
from halfstep.hardware.probe import probe
from halfstep.jobs.job import Job
from halfstep.planning.capacity import Capacity, parse_memory
from halfstep.planning.estimator import Estimate, Estimator
from halfstep.planning.measured import measure_step, quiet_gpu
from halfstep.planning.trace import StepOptions
from halfstep.precision.choice import resolve
from halfstep.precision.policy import Policy

__all__ = ["FoundBatch", "find_batch_size", "search"]

_START = 8
_STEP = 32  # one trial up or down is a 32nd of the batch
_MOST_TRIALS = 8


@dataclass(frozen=True)
class FoundBatch:
    """The largest batch, with the trials that confirm it."""

    batch: int
    precision: str
    predicted: Estimate
    confirmed: bool  # by a trial on this machine; otherwise it is the plan's word alone
    trials: tuple[tuple[int, bool], ...] = ()  # batch, whether it fitted


def find_batch_size(
    job: Job,
    precision: str | Policy = "auto",
    *,
    memory: str | int | None = None,
    accumulate: int = 1,
    ema: bool = False,
) -> FoundBatch:
    """The largest micro-batch of `job` that fits: on this machine's GPU by trial, or in `memory` by the plan alone."""
    policy, notes = resolve(precision, probe())
    for note in notes:
        say(note)
    options = StepOptions(accumulate, ema)
    if memory is None and not torch.cuda.is_available():
        raise SettingError(
            "find_batch_size() tries batches on a GPU, and torch sees none here. Give memory='80GiB' to have the plan's answer for "
            "a GPU of that size."
        )
    if memory is not None:
        size = memory if isinstance(memory, int) else parse_memory(memory)
        limit = Capacity("the given memory", size).usable_bytes
    else:
        free, _ = torch.cuda.mem_get_info()
        limit = int((free + torch.cuda.memory_reserved()) / 1.03)
    estimator = Estimator(job, policy, options=options, room=limit)
    if estimator.batches.fixed:
        raise SettingError(
            f"{job.describe('data')} takes no notice of batch_size, so there is no largest batch to find: it gives the same batches, "
            "whatever size is asked. Let it take an argument named batch_size and make batches of that many examples."
        )
    predicted = estimator.largest(limit, _START)
    if predicted is None:
        one = estimator.at(1)
        raise SettingError(
            f"Not even one example fits in {policy}: a step needs {one.need_bytes / 2**30:.2f} GiB and {limit / 2**30:.2f} GiB can be "
            "used. Use a leaner precision, activation checkpointing, or shard the model over several GPUs."
        )
    if memory is not None:
        return FoundBatch(predicted.batch, str(policy), predicted, confirmed=False)
    batch, trials = search(predicted.batch, lambda size: _fits(job, policy, size, options))
    if batch == 0:
        raise SettingError(
            f"Every trial from {predicted.batch} down to 1 ran out of memory; is another process using the GPU?"
        )
    return FoundBatch(batch, str(policy), estimator.at(batch, trace=False), confirmed=True, trials=trials)


def search(start: int, fits: Callable[[int], bool]) -> tuple[int, tuple[tuple[int, bool], ...]]:
    """The largest batch that `fits`, to a 32nd, from a good guess; 0 if none does. With the trials made."""
    trials: list[tuple[int, bool]] = []

    def attempt(size: int) -> bool:
        trials.append((size, fits(size)))
        return trials[-1][1]

    step = max(1, start // _STEP)
    good, bad = (start, None) if attempt(start) else (0, start)
    while bad is None and len(trials) < _MOST_TRIALS:
        size = good + step
        good, bad = (size, None) if attempt(size) else (good, size)
    down = step
    while good == 0 and bad is not None and bad > 1:
        size = max(1, bad - down)
        good, bad = (size, bad) if attempt(size) else (0, size)
        down *= 2
    while bad is not None and good and bad - good > step and len(trials) < _MOST_TRIALS + 4:
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
    # Outside the handler: the exception holds the frames, and they the tensors.
    with quiet_gpu():
        return fitted
