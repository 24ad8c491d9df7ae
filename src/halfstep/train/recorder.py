"""Records a run: the run file, TensorBoard if it is installed, other loggers, and an observer.

Losses are read back asynchronously, like all results of a step: they are queued behind the step and written when they
arrive, so that logging every step adds no synchronization.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from halfstep.checkpoint.runlog import RunLog
from halfstep.engine.engine import Engine
from halfstep.engine.result import StepResult
from halfstep.events import log_info, log_warning
from halfstep.jobs.data.feed import FeedMeter
from halfstep.precision.formats import Format, get_format
from halfstep.scaling.readback import Readback
from halfstep.train.batches import StepBatches
from halfstep.train.board import open_board
from halfstep.train.numerics import record_event, record_sample
from halfstep.train.writer import Writer
from halfstep.watching.events import Event
from halfstep.watching.watch import Watch

__all__ = ["Observer", "Recorder", "SilentLog", "SilentObserver", "StepLine"]


@dataclass(frozen=True)
class StepLine:
    """One optimizer step, as recorded and shown."""

    step: int
    epoch: int
    loss: float
    lr: float
    skipped: bool
    grad_norm: float | None
    scale: float | None
    skips: int
    samples_per_second: float


class Observer(Protocol):
    """Receives the progress of a run."""

    def started(self, engine: Engine, total_steps: int | None) -> None:
        """The run starts."""

    def stepped(self, line: StepLine) -> None:
        """The result of a step has arrived."""

    def validated(self, epoch: int, values: dict[str, float]) -> None:
        """A validation finished."""

    def saved(self, path: Path) -> None:
        """A checkpoint was written."""


class SilentObserver:
    """An observer that ignores everything."""

    def started(self, engine: Engine, total_steps: int | None) -> None:
        """Ignore it."""

    def stepped(self, line: StepLine) -> None:
        """Ignore it."""

    def validated(self, epoch: int, values: dict[str, float]) -> None:
        """Ignore it."""

    def saved(self, path: Path) -> None:
        """Ignore it."""


class SilentLog(RunLog):
    """The run file of the ranks that write none."""

    def __init__(self) -> None:
        self.run_id = ""

    def step(self, *, micro_batch: int, attempted: int, applied: int, **values: Any) -> None:
        """Ignore it."""

    def event(self, kind: str, **fields: Any) -> None:
        """Ignore it."""

    def resume(self, *, attempted: int, applied: int, micro_batch: int | None = None, **fields: Any) -> None:
        """Ignore it."""

    def close(self) -> None:
        """Nothing to close."""


class Recorder:
    """Collects losses and results, and writes one line per optimizer step."""

    def __init__(
        self,
        log: RunLog,
        observer: Observer,
        tensorboard: Path | None,
        watch: Watch | None = None,
        compute: str = "fp32",
        writers: Sequence[Writer] = (),
        feed: FeedMeter | None = None,
    ) -> None:
        self.log, self.observer, self._watch, self._feed = log, observer, watch, feed
        self._board = open_board(tensorboard, writers)
        self._losses = Readback()
        self._started = time.perf_counter()
        self._skips = 0
        self._truth_recorded, self._sampled = False, 0
        fmt = get_format(compute)
        self._format = fmt if isinstance(fmt, Format) else None
        self.last: StepLine | None = None

    def record_truth(self, engine: Engine) -> None:
        """Record the truth table after the first step of this process; the header was written before anything had run."""
        if not self._truth_recorded:
            self._truth_recorded = True
            truth = engine.truth()
            self.log.event("truth", truth=truth.as_dict())
            self._board.text("truth", str(truth), engine.progress.attempts)

    def push(
        self,
        result: StepResult,
        loss: Tensor,
        *,
        epoch: int,
        micro_batch: int,
        samples: int,
        batches: StepBatches | None = None,
    ) -> None:
        """Queue a step; it is written when its values have arrived. `batches` identifies what it was computed from.

        `loss` has the loss of all ranks, and the rank whose own is not finite (-1 if there is none); or only the first.
        """
        now = time.perf_counter()
        rate = samples / max(now - self._started, 1e-9)
        self._started = now
        self._losses.push(loss.detach().float().reshape(-1), (result, epoch, micro_batch, rate, samples, batches))
        self.flush(wait=False)

    def flush(self, *, wait: bool) -> None:
        """Write the steps whose values have arrived, or with `wait`, all of them."""
        for (result, epoch, micro_batch, rate, samples, batches), (loss, *ranks) in self._losses.deliver(wait=wait):
            self._skips += result.skipped
            line = StepLine(
                result.step, epoch, loss, result.lr, result.skipped, result.grad_norm, result.scale, self._skips, rate
            )
            self.log.step(
                micro_batch=micro_batch,
                attempted=line.step,
                applied=line.step - self._skips,
                epoch=epoch,
                loss=loss,
                lr=line.lr,
                skipped=line.skipped,
                grad_norm=line.grad_norm,
                scale=line.scale,
                samples_per_second=round(rate, 3),
            )
            self._board.scalars(
                "train", {"loss": loss, "lr": line.lr, "scale": line.scale or 1.0, "skips": self._skips}, line.step
            )
            self.last = line
            self.observer.stepped(line)
            broken = int(ranks[0]) if ranks else -1
            if broken > 0:  # the batches below are of rank 0
                log_warning(f"The loss of step {line.step} is not finite on rank {broken}.")
                self.log.event("loss-of-rank", step=line.step, rank=broken)
            if self._watch is not None:
                identify = None if batches is None or broken > 0 else batches.identify
                self._watch.observe_loss(line.step, loss, identify, samples)
        self._record_samples()
        feed = None if self._feed is None else self._feed.result(wait=wait)
        if feed is not None:
            log_info(str(feed))
            self.log.event("feed", **feed.as_data())

    def _record_samples(self) -> None:
        """Write the samples of the Watch that have arrived since the last call."""
        samples = [] if self._watch is None else [s for s in self._watch.samples if s.step > self._sampled]
        for sample in samples:
            self._sampled = sample.step
            record_sample(self.log, sample)
            self._board.sample(sample, self._format)

    def event(self, event: Event) -> None:
        """Record an event of the Watch."""
        record_event(self.log, event)
        self._board.event(event)

    def start_from(self, *, skips: int) -> None:
        """Continue the count of skipped steps of a resumed run."""
        self._skips = skips

    def restart_clock(self) -> None:
        """Exclude the time since the last step (validation, saving) from the speed of the next one."""
        self._started = time.perf_counter()

    def validated(self, epoch: int, step: int, values: dict[str, float]) -> None:
        """Record a validation."""
        self.log.event("validation", epoch=epoch, **values)
        self._board.scalars("val", values, step)
        self.observer.validated(epoch, values)

    def saved(self, path: Path) -> None:
        """Record a checkpoint."""
        self.log.event("saved", path=path.name)
        self.observer.saved(path)

    def close(self) -> None:
        """Write everything and close the files."""
        self.flush(wait=True)
        self.log.close()
        self._board.close()
