"""The memory of a job's training step at any batch size: traced, or interpolated between traces and checked.

A trace takes a few seconds. Two traces at different batch sizes have the same events in their ledgers, and the size of each
event is linear in the batch size, so the peak at any other size is a replay, not a trace. If an answer depends on it
(the largest batch that fits), the answer itself is traced once more, and if the line was wrong there, the new trace
becomes one end of a better line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from halfstep.backends.context import RunContext
from halfstep.engine.recompute import CHEAP
from halfstep.errors import HalfstepError, SettingError
from halfstep.events import log_info
from halfstep.jobs.job import Job
from halfstep.planning.batches import Batches, look_at_data
from halfstep.planning.capacity import capacity_of
from halfstep.planning.ledger import OPTIONAL, Line, line_through
from halfstep.planning.replay import Peak, replay
from halfstep.planning.trace import StepOptions, Traced, trace_step
from halfstep.planning.untraceable import explain_failure
from halfstep.planning.workspaces import CUBLAS_BYTES
from halfstep.precision.policy import Policy

__all__ = ["Estimate", "Estimator", "predict_peak"]

_MAX_BATCH = 1 << 22  # where the search for the largest ends
_MORE_TRACES = 3  # at twice the batch each, before a search traces every size that it tries
_CLOSE = 0.005  # a line is confirmed if its prediction is this close to a trace


@dataclass(frozen=True)
class Estimate:
    """The predicted memory of one step in one precision at one micro-batch size."""

    precision: str
    batch: int
    peak: Peak
    least: Peak  # the same without what is allocated only if it fits
    num_params: int
    traced: bool  # or on the line through two traces
    build_bytes: int  # peak of setting up the Engine
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The predicted torch.cuda.max_memory_allocated()."""
        return self.peak.allocated

    @property
    def at_end(self) -> bool:
        """Whether the search for the largest batch ended here although more would fit."""
        return self.batch >= _MAX_BATCH

    @property
    def need_bytes(self) -> int:
        """What a step needs; it may allocate more if more is free."""
        return self.least.allocated


class Estimator:
    """One job in one precision, with its traces."""

    def __init__(
        self,
        job: Job,
        policy: Policy,
        *,
        options: StepOptions | None = None,
        seed: int = 0,
        batches: Batches | None = None,
        usable_bytes: int | None = None,
    ) -> None:
        self.job, self.policy = job, policy
        self.options = options or StepOptions()
        self._run_context = RunContext(seed=seed)
        self._batches = batches
        self._usable_bytes = usable_bytes  # that a GPU has for tensors, if that is known
        self._traces: dict[int, Traced] = {}
        self._estimates: dict[int, Estimate] = {}
        self._lines: dict[tuple[int, int], Line | None] = {}
        self._line_confirmed = False  # by a trace between or beyond its ends
        self._real = False  # whether the model must be built with real data
        self.workspaces = CUBLAS_BYTES

    @property
    def batches(self) -> Batches:
        """The shapes of the job's batches."""
        if self._batches is None:
            self._batches = look_at_data(self.job, self._run_context)
        return self._batches

    def trace(self, batch: int) -> Traced:
        """The trace at this batch size, run if there is none."""
        if batch < 1:
            raise SettingError(f"batch={batch} must be 1 or more.")
        if batch not in self._traces:
            self._traces[batch] = self._run(batch)
        return self._traces[batch]

    def _run(self, batch: int) -> Traced:
        inputs = self.batches.at(batch)
        context = replace(self._run_context, batch_size=batch)
        if not self._real:
            try:
                return trace_step(self.job, self.policy, inputs, context, self.options)
            except SettingError:
                raise
            except Exception as error:
                if not _worth_building():
                    raise explain_failure(self.job, self.policy, error) from error
                self._real = True
        try:
            traced = trace_step(self.job, self.policy, inputs, context, self.options, real=True)
        except Exception as error:
            raise explain_failure(self.job, self.policy, error) from error
        note = "The model reads tensor data while it is built, so it was built in memory once for this plan."
        return replace(traced, notes=(*traced.notes, note))

    def at(self, batch: int, *, trace: bool = True) -> Estimate:
        """The estimate at a batch size; without `trace`, from the line through existing traces, if there is one."""
        previous = self._estimates.get(batch)
        if previous is not None and (previous.traced or not trace):
            return previous
        line = None if trace or batch in self._traces else self._line(batch)
        traced = self.trace(batch) if line is None else next(iter(self._traces.values()))
        ledger = traced.ledger if line is None else line.ledger(batch)
        peak = replay(ledger, self.workspaces, self._usable_bytes)
        has_optional = any(event.category == OPTIONAL and event.num_bytes for event in ledger.events)
        estimate = Estimate(
            precision=str(self.policy),
            batch=batch,
            peak=peak,
            least=replay(ledger, self.workspaces, 0) if has_optional else peak,
            num_params=traced.num_params,
            traced=line is None,
            build_bytes=traced.build_bytes + self.workspaces,
            notes=(*self.batches.notes, *traced.notes),
        )
        if previous is not None and abs(previous.peak_bytes - estimate.peak_bytes) <= _CLOSE * estimate.peak_bytes:
            self._line_confirmed = True
        self._estimates[batch] = estimate
        return estimate

    def _line(self, batch: int) -> Line | None:
        """The line through the two traced sizes nearest to `batch`, if there is one."""
        if len(self._traces) < 2:
            return None
        low, high = sorted(sorted(self._traces, key=lambda size: abs(size - batch))[:2])
        if (low, high) not in self._lines:
            line = self._through(low, high)
            if line is None:  # what a model creates once and keeps (a table of positions) is only in the first trace
                first = next(size for size in self._traces if size in (low, high))
                self._traces[first] = self._run(first)
                line = self._through(low, high)
            self._lines[low, high] = line
        return self._lines[low, high]

    def _through(self, low: int, high: int) -> Line | None:
        return line_through(self._traces[low].ledger, low, self._traces[high].ledger, high)

    def recomputing(self) -> Estimator:
        """The same job and precision with recompute="cheap"."""
        return Estimator(
            self.job,
            self.policy,
            options=replace(self.options, recompute=CHEAP),
            seed=self._run_context.seed,
            batches=self.batches,
            usable_bytes=self._usable_bytes,
        )

    def checked(self, batch: int) -> Estimate:
        """The estimate at a batch size, traced unless the line is confirmed."""
        return self.at(batch, trace=not self._line_confirmed)

    def largest(self, limit_bytes: int, start: int) -> Estimate | None:
        """The largest micro-batch whose need is within `limit_bytes`, traced; None if not even one example fits."""
        self.trace(start)
        self.trace(max(1, start // 2) if start > 1 else 2)
        for _ in range(4):
            best = self._on_line(limit_bytes)
            if best <= 1:  # the line may be wrong for so small a batch, and one example is worth a trace
                one = self.at(1)
                return one if one.need_bytes <= limit_bytes else None
            guess = self.at(best, trace=False)
            traced = self.at(best)
            close = abs(traced.need_bytes - guess.need_bytes) <= _CLOSE * traced.need_bytes
            if traced.need_bytes <= limit_bytes and close:
                return traced
        # The memory is not linear in the batch: the largest traced size that fits is a safe answer.
        safe = [size for size in self._traces if self.at(size).need_bytes <= limit_bytes]
        return self.at(max(safe)) if safe else None

    def _on_line(self, limit_bytes: int) -> int:
        """The largest batch within the limit by the line, 0 if none is."""
        line = self._line(max(self._traces))
        for _ in range(_MORE_TRACES):
            if line is not None:
                break
            # What the smallest batches run is not always what larger ones do: torch computes the loss of few logits, for
            # example. One more trace costs less than a search without a line.
            self.trace(2 * max(self._traces))
            line = self._line(max(self._traces))
        sizes = sorted(self._traces)
        # The allocator's rounding, as a factor; `requested` does not include it.
        top = self.at(sizes[-1]).least
        factor = top.allocated / max(1, top.allocated - top.breakdown.get("rounding", 0))

        def fits(size: int) -> bool:
            if line is None:
                return self.at(size).need_bytes <= limit_bytes
            return (line.requested(size) + self.workspaces) * factor <= limit_bytes

        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
            if high > _MAX_BATCH:
                return low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        while low > 1 and self.at(low, trace=False).need_bytes > limit_bytes:
            low -= max(1, low // 200)
        return low


def _worth_building() -> bool:
    """Whether a second attempt with a real model is allowed; it needs as much memory as the weights."""
    return os.environ.get("HALFSTEP_PLAN_REAL_MODEL", "1") != "0"


def predict_peak(
    job: Job,
    policy: Policy | str,
    batch: int,
    *,
    accumulate: int = 1,
    ema: bool = False,
    recompute: str | float | None = None,
    seed: int = 0,
    gpu: str | None = None,
) -> Estimate | None:
    """The predicted peak of one training step; logs a message and returns None if the job cannot be traced.

    It is that of this machine's GPU, or of the one that `gpu` names.
    """
    chosen = Policy.parse(policy) if isinstance(policy, str) else policy
    here = capacity_of(gpu, None)
    usable = None if here is None else here.usable_bytes
    options = StepOptions(accumulate, ema, recompute)
    estimator = Estimator(job, chosen, options=options, seed=seed, usable_bytes=usable)
    try:
        return estimator.at(batch)
    except HalfstepError as error:
        log_info(f"The memory of a step cannot be predicted: {error}")
        return None
