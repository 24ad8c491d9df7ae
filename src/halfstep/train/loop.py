"""The training loop over a Job: what `halfstep train` does, as one function.

Each epoch trains, validates and saves; after a signal the current step is finished, a checkpoint is written and the run
ends. A resumed run continues bit for bit as if it had not been stopped: weights, masters, moments, loss scale, schedules,
EMA, random-number state and the position in the data are all in the checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.backends.context import RunContext
from halfstep.checkpoint.runlog import RunLog
from halfstep.engine.engine import Engine
from halfstep.engine.result import StepResult
from halfstep.errors import SettingError
from halfstep.events import log_info
from halfstep.hardware.environment import environment
from halfstep.jobs.job import Job
from halfstep.train.checkpoints import Progress, RunCheckpoints
from halfstep.train.config import TrainConfig
from halfstep.train.memory import PeakCounter, compare_memory
from halfstep.train.recorder import Observer, Recorder, SilentObserver
from halfstep.train.resume import RUN_FILE, Source
from halfstep.train.stop import StopRequest
from halfstep.train.stream import DataStream, batch_size_of, to_device
from halfstep.train.validation import validate

__all__ = ["TrainOutcome", "train"]

TENSORBOARD = "tensorboard"  # in the directory of a run


@dataclass(frozen=True)
class TrainOutcome:
    """How a run ended."""

    out: Path
    precision: str
    steps: int
    epochs: int
    skips: int
    loss: float | None  # of the last training step
    validation: dict[str, float]
    checkpoint: Path | None
    stopped_by: str | None  # the name of the signal that stopped the run


def train(
    job: Job,
    config: TrainConfig,
    *,
    precision: str = "auto",
    out: Path,
    resume: bool = False,
    command: Sequence[str] = (),
    source: Source | None = None,
    observer: Observer | None = None,
) -> TrainOutcome:
    """Train `job` and write run file, checkpoints and TensorBoard logs under `out`; `source` loads the job on a resume."""
    if config.steps is None and config.epochs is None:
        raise SettingError("The run has no end: set steps or epochs.")
    header: dict[str, Any] = {"command": list(command)}
    if source is not None:
        header["source"] = dataclasses.asdict(source)
    run = _Run(job, config, precision, out, resume=resume, header=header, observer=observer or SilentObserver())
    with StopRequest() as stop:
        try:
            return run.train(stop)
        finally:
            run.close()


class _Run:
    """The objects of one run; lives for one call of `train`."""

    def __init__(
        self,
        job: Job,
        config: TrainConfig,
        precision: str,
        out: Path,
        *,
        resume: bool,
        header: dict[str, Any],
        observer: Observer,
    ) -> None:
        self.job, self.config, self.out, self.resumed = job, config, out, resume
        self.checkpoints = RunCheckpoints(out, config, resume=resume, has_metric=job.metric is not None)
        torch.manual_seed(config.seed)
        self.context = RunContext.single(config.device, seed=config.seed, batch_size=config.batch)
        self.memory = PeakCounter(self.context.device)
        self.model, self.engine = _build(job, self.context, config, precision)
        self.data = DataStream(job, self.context, split="train")
        self.validation_data = DataStream(job, self.context, split="val")
        self.recorder = Recorder(self._open_log(header), observer, out / TENSORBOARD)
        self.progress = self.checkpoints.restore(self.engine, self.data)
        self.recorder.start_from(skips=self.engine.progress.attempts - self.engine.progress.applied)
        self._loss_sum: Tensor | None = None
        self._num_losses = self._samples = 0

    def _open_log(self, header: dict[str, Any]) -> RunLog:
        path = self.out / RUN_FILE
        if path.exists() and (self.checkpoints.latest is not None or path.stat().st_size):
            return RunLog(path)
        self.out.mkdir(parents=True, exist_ok=True)
        return RunLog.create(
            path,
            policy=str(self.engine.policy),
            truth=self.engine.truth().as_dict(),
            environment=environment(),
            config=dataclasses.asdict(self.config),
            **header,
        )

    def train(self, stop: StopRequest) -> TrainOutcome:
        engine, config, log = self.engine, self.config, self.recorder.log
        if self.resumed:
            log.resume(
                attempted=engine.progress.attempts,
                applied=engine.progress.applied,
                micro_batch=engine.progress.micro_batches,
            )
        self.recorder.observer.started(engine, self._total_steps())
        while not self._done(self.progress.epoch) and not stop:
            epoch = self.progress.epoch
            ended_by = self._train_epoch(epoch, stop)
            self.recorder.flush(wait=True)
            if ended_by == "stop":
                break
            epoch_done = ended_by == "epoch"
            last = not epoch_done or self._done(epoch + 1)
            validated = last or (epoch + 1) % config.eval_every == 0
            if validated:
                self._validate()
            if last or config.save_every is None:
                self._save(epoch_done=epoch_done, validated=validated)
            if epoch_done:
                self.progress = dataclasses.replace(self.progress, epoch=epoch + 1)
            if last:
                break
        if stop and self.checkpoints.saved_at != engine.progress.attempts:
            self._save(epoch_done=False, validated=False)
        if (peak := self.memory.peak()) is not None and not stop:
            log.event("memory", **compare_memory(self.job, engine.policy, config, peak))
        return self._outcome(stop)

    def _train_epoch(self, epoch: int, stop: StopRequest) -> str:
        """Train one epoch; returns what ended it: its data ("epoch"), the step limit ("steps"), or a signal ("stop")."""
        config = self.config
        self.model.train()
        self.recorder.restart_clock()
        for batch in self.data.batches(epoch):
            self._micro_batch(to_device(batch, self.context.device), epoch)
            if self.engine.in_window:
                continue
            if self._steps_done():
                return "steps"
            if stop:
                return "stop"
            if config.save_every is not None and self.engine.progress.attempts % config.save_every == 0:
                self._save(epoch_done=False, validated=False)
        if self.engine.in_window:
            self._record(self.engine.step(last=True), epoch)
        return "epoch"

    def _micro_batch(self, batch: Any, epoch: int) -> None:
        with self.engine.forward():
            loss = self.job.call("loss", self.context, model=self.model, batch=batch, epoch=epoch, split="train")
        self.engine.backward(loss)
        loss = loss.detach().to(torch.float32, copy=True)  # a CUDA graph overwrites it on replay
        self._loss_sum = loss if self._loss_sum is None else self._loss_sum + loss
        self._num_losses += 1
        self._samples += batch_size_of(batch, self.config.batch)
        result = self.engine.step()
        if result.boundary:
            self._record(result, epoch)

    def _record(self, result: StepResult, epoch: int) -> None:
        assert self._loss_sum is not None
        self.recorder.push(
            result,
            self._loss_sum / self._num_losses,
            epoch=epoch,
            micro_batch=self.engine.progress.micro_batches,
            samples=self._samples,
        )
        self.recorder.record_truth(self.engine)
        self._loss_sum, self._num_losses, self._samples = None, 0, 0

    def _validate(self) -> None:
        epoch = self.progress.epoch
        values = validate(self.job, self.context, self.model, self.engine, self.validation_data, epoch)
        self.progress = Progress(epoch, values)
        self.recorder.validated(epoch, self.engine.progress.attempts, values)

    def _save(self, *, epoch_done: bool, validated: bool) -> None:
        self.recorder.flush(wait=True)
        path = self.checkpoints.save(self.engine, self.data, self.progress, epoch_done=epoch_done, validated=validated)
        self.recorder.saved(path)
        self.recorder.restart_clock()

    def _steps_done(self) -> bool:
        return self.config.steps is not None and self.engine.progress.attempts >= self.config.steps

    def _done(self, epoch: int) -> bool:
        return (self.config.epochs is not None and epoch >= self.config.epochs) or self._steps_done()

    def _total_steps(self) -> int | None:
        """The number of steps at the end of the run, if it is known in advance."""
        config, batches = self.config, self.data.num_batches(self.progress.epoch)
        if config.epochs is None or batches is None:
            return config.steps
        total = config.epochs * -(-batches // config.accumulate)
        return total if config.steps is None else min(total, config.steps)

    def _outcome(self, stop: StopRequest) -> TrainOutcome:
        engine, last, checkpoint = self.engine, self.recorder.last, self.checkpoints.latest
        if stop.signal is not None:
            log_info(
                f"Stopped by {stop.signal.name} after step {engine.progress.attempts}; saved {checkpoint}. Continue with --resume."
            )
        return TrainOutcome(
            self.out,
            str(engine.policy),
            engine.progress.attempts,
            self.progress.epoch,
            engine.progress.attempts - engine.progress.applied,
            None if last is None else last.loss,
            self.progress.values,
            checkpoint,
            None if stop.signal is None else stop.signal.name,
        )

    def close(self) -> None:
        self.recorder.close()
        self.engine.close()


def _build(job: Job, run: RunContext, config: TrainConfig, precision: str) -> tuple[nn.Module, Engine]:
    """The job's model on the run's device, and the engine over it."""
    model = job.call("model", run).to(run.device)
    optimizer = job.call("optimizer", run, model=model)
    engine = Engine(
        model,
        optimizer,
        precision,
        max_norm=config.max_norm,
        accumulate=config.accumulate,
        scheduler=job.call("scheduler", run, optimizer=optimizer, model=model),
        ema=config.ema,
        compile=config.compile,
        deterministic=config.deterministic,
        gradient_release=config.gradient_release,
    )
    return model, engine
