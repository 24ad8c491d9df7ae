"""The training loop over a Job: what `halfstep train` does, as one function.

Each epoch trains, saves and validates, in this order, so that a validation that fails or is stopped costs nothing; the
checkpoint gets its score afterwards. After a signal the current step is finished, a checkpoint is written and the run
ends; a validation ends at once, and is repeated when the run resumes. A resumed run continues bit for bit as if it had not been stopped: weights, masters, moments, loss scale, schedules,
EMA, random-number state and the position in the data are all in the checkpoint.

On several ranks every rank runs this loop, and all of them take the same turns: they agree on the signal that ends the
run (`ranks.AgreedStop`), save together and average over the same batches. Rank 0 alone writes files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.backends.consistency import compare_ranks
from halfstep.backends.context import RunContext
from halfstep.backends.ranks import ranks_of
from halfstep.checkpoint.rng import seed_everything
from halfstep.checkpoint.runlog import RunLog
from halfstep.engine.result import StepResult
from halfstep.errors import HalfstepError, OverflowStop, SettingError
from halfstep.events import log_info, log_warning, quiet
from halfstep.hardware.environment import environment
from halfstep.jobs.failures import JobError, user_line
from halfstep.jobs.job import Job
from halfstep.train.batches import WindowBatches
from halfstep.train.build import build_engine, run_context, seed_rank
from halfstep.train.checkpoints import Progress, RunCheckpoints
from halfstep.train.code import code_facts
from halfstep.train.config import DEFAULT_BATCH, TrainConfig, total_steps
from halfstep.train.health import describe_problem, mean_loss
from halfstep.train.heartbeat import Heartbeat, watch_ranks
from halfstep.train.launched import describe_ranks
from halfstep.train.memory import PeakCounter, compare_memory
from halfstep.train.numerics import summary_of, watch_of
from halfstep.train.outcome import TrainOutcome
from halfstep.train.recorder import Observer, Recorder, SilentLog, SilentObserver
from halfstep.train.resume import RUN_FILE, Source
from halfstep.train.schedule import check_validation, reject_metric_schedulers, step_on_metric
from halfstep.train.stop import AgreedStop, StopRequest
from halfstep.train.stream import DataStream, to_device
from halfstep.train.validation import ValidationStopped, validate
from halfstep.train.writer import OpenWriter, RunInfo, open_writers
from halfstep.watching.events import Event

__all__ = ["TrainOutcome", "train"]

TENSORBOARD = "tensorboard"  # in the directory of a run


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
    ranks: RunContext | None = None,
    launch_id: str | None = None,
    writers: Sequence[OpenWriter] = (),
) -> TrainOutcome:
    """Train `job` and write run file, checkpoints and TensorBoard logs under `out`; `source` loads the job on a resume.

    `ranks` is the context of this process from `backends.group.open_group`; every rank makes the same call.
    `launch_id` is recorded, so that a restart of the same launch recognises its run. `writers` are opened on rank 0.
    """
    if config.steps is None and config.epochs is None:
        raise SettingError("The run has no end: set steps or epochs.")
    if config.batch is None:
        config = dataclasses.replace(config, batch=job.default_batch_size() or DEFAULT_BATCH)
    header: dict[str, Any] = {"command": list(command)}
    if launch_id is not None:
        header["launch"] = launch_id
    if source is not None:
        header["source"] = dataclasses.asdict(source)
    context = run_context(config, ranks)
    shown = observer or SilentObserver()
    with watch_ranks(context, config.timeout) as heartbeat, quiet(unless=context.rank == 0):
        run = _Run(
            job, config, precision, out, context, heartbeat, writers, resume=resume, header=header, observer=shown
        )
        return _train(run)


def _train(run: _Run) -> TrainOutcome:
    with StopRequest(saves=True) as request:
        try:
            return run.train(AgreedStop(request, run.ranks))
        except KeyboardInterrupt as error:
            if request:
                raise
            raise JobError(
                f"The job raised KeyboardInterrupt{user_line(error)}, which is reserved for Ctrl-C; raise another exception."
            ) from error
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
        context: RunContext,
        heartbeat: Heartbeat,
        writers: Sequence[OpenWriter],
        *,
        resume: bool,
        header: dict[str, Any],
        observer: Observer,
    ) -> None:
        self.job, self.config, self.out, self.resumed = job, config, out, resume
        self.context, self.heartbeat = context, heartbeat
        self.ranks = ranks_of(context, config.timeout)
        if self.ranks.several:  # reading the files of the package takes a moment
            compare_ranks(code_facts(job, config, precision), self.ranks)
        self.checkpoints = RunCheckpoints(out, config, self.ranks, resume=resume, has_metric=job.metric is not None)
        seed_everything(config.seed)
        self.memory = PeakCounter(self.context.device)
        self.watch = watch_of(config, self._record_event)
        self.model, self.engine = build_engine(job, context, config, precision, self.watch, self.ranks)
        seed_rank(config.seed, context.rank)
        check_validation(job, self.engine)
        self.data = DataStream(job, self.context, split="train")
        self.validation_data = DataStream(job, self.context, split="val")
        log, compute = self._open_log(header), self.engine.policy.compute
        board = out / TENSORBOARD if self.ranks.is_main else None
        info = RunInfo(log.run_id, out, str(self.engine.policy), dataclasses.asdict(config))
        opened = open_writers(writers, info, self.ranks)
        self.recorder = Recorder(log, observer, board, self.watch, compute, opened, self.data.feed)
        self.progress = self.checkpoints.restore(self.engine, self.data, self.watch)
        self.recorder.start_from(skips=self.engine.progress.attempts - self.engine.progress.applied)
        self._before = (self.engine.progress.attempts, self.engine.progress.applied)
        self._data_failed, self._recorded = False, self.engine.progress.attempts
        self._loss_sum: Tensor | None = None
        self._num_losses = self._samples = self._all_samples = 0  # of all ranks
        self._window = WindowBatches(active=self.watch is not None)

    def _record_event(self, event: Event) -> None:
        self.recorder.event(event)  # built after the Watch

    def _open_log(self, header: dict[str, Any]) -> RunLog:
        if not self.ranks.is_main:
            return SilentLog()
        path = self.out / RUN_FILE
        if path.exists() and (self.checkpoints.latest is not None or path.stat().st_size):
            return RunLog(path)
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"--out {self.out} cannot be created: {error.strerror}; pass another --out.") from error
        return RunLog.create(
            path,
            policy=str(self.engine.policy),
            truth=self.engine.truth().as_dict(),
            environment=environment(),
            config=dataclasses.asdict(self.config),
            ranks=describe_ranks(self.context, self.engine.backend),
            **header,
        )

    def train(self, stop: AgreedStop) -> TrainOutcome:
        engine, config, log = self.engine, self.config, self.recorder.log
        if self.resumed:
            log.resume(
                attempted=engine.progress.attempts,
                applied=engine.progress.applied,
                micro_batch=engine.progress.micro_batches,
            )
        self.recorder.observer.started(engine, total_steps(config, self.data.num_batches(self.progress.epoch)))
        if self.progress.unvalidated is not None:  # the run ended between the checkpoint and its validation
            self._validate(stop, epoch_done=not self.data.resumes_in(self.progress.epoch))
        while not self._done(self.progress.epoch) and not stop:
            epoch = self.progress.epoch
            self._step_schedulers_on_metric(epoch)
            try:
                ended_by = self._train_epoch(epoch, stop)
            except HalfstepError as error:  # such as OverflowStop, or a scheduler at its end
                if engine.progress.attempts > self._recorded:  # the step itself is complete
                    self._save_before_failing(everywhere=isinstance(error, OverflowStop))
                raise
            self.recorder.flush(wait=True)
            if ended_by == "stop":
                break
            epoch_done = ended_by == "epoch"
            last = not epoch_done or self._done(epoch + 1)
            due = last or (epoch + 1) % config.eval_every == 0
            self.progress = Progress(epoch + epoch_done, self.progress.values, epoch if due else None)
            if last or config.save_every is None:
                self._save(epoch_done=epoch_done)
            if due:
                self._validate(stop, epoch_done=epoch_done)
            if last:
                break
        stop.settle()
        if stop and self.checkpoints.saved_at != engine.progress.attempts:
            self._save(epoch_done=False)
        self._finish_save()
        if (peak := self.memory.peak()) is not None and not stop:
            planned = config if not self.ranks.several else None  # the plan is of one process
            log.event("memory", **compare_memory(self.job, engine.policy, planned, peak))
        outcome = self._outcome(stop)
        log.event("ended", stopped_by=outcome.stopped_by, problem=outcome.problem)
        return outcome

    def _train_epoch(self, epoch: int, stop: AgreedStop) -> str:
        """Train one epoch; returns what ended it: its data ("epoch"), the step limit ("steps"), or a signal ("stop")."""
        config = self.config
        self.model.train()
        self.recorder.restart_clock()
        for batch in self._batches(epoch, stop):
            self.heartbeat.tick(f"the forward of step {self.engine.progress.attempts + 1}")
            self._window.add(self.data, batch)
            self._micro_batch(to_device(batch, self.context.device), epoch)
            if self.engine.in_window:
                continue
            stop.poll()
            if self._steps_done():
                return "steps"
            if stop:
                return "stop"
            if config.save_every is not None and self.engine.progress.attempts % config.save_every == 0:
                self._save(epoch_done=False)
        if stop and not self.engine.in_window and self._data_failed:
            return "stop"
        if self.engine.in_window:
            self._record(self.engine.step(last=True), epoch)
        return "epoch"

    def _batches(self, epoch: int, stop: AgreedStop) -> Iterator[Any]:
        """The training batches; data that fails after a signal ends them, as Ctrl-C also reaches its worker processes."""
        self._data_failed = False
        batches = self.data.batches(epoch)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (HalfstepError, KeyboardInterrupt):
                if not stop or self.engine.in_window:
                    self._save_before_failing()
                    raise
                self._data_failed = True
                return
            yield batch

    def _save_before_failing(self, *, everywhere: bool = False) -> None:
        """Save the steps since the last checkpoint, if the error came between two windows, and `everywhere` or on the only rank."""
        step = self.engine.progress.attempts
        if self.ranks.several and not everywhere:
            return  # the other ranks are in the next step
        if step and step != self.checkpoints.saved_at and not self.engine.in_window:
            self._save(epoch_done=False)
            log_warning(f"The run fails after step {step}, which is saved in {self.out}.")

    def _micro_batch(self, batch: Any, epoch: int) -> None:
        def compute() -> Any:
            return self.job.call("loss", self.context, model=self.model, batch=batch, epoch=epoch, split="train")

        with self.engine.forward():
            loss = compute()
        self.heartbeat.tick(f"the backward of step {self.engine.progress.attempts + 1}")
        self.engine.backward(loss, weight=self.data.share.weight)
        loss = loss.detach().to(torch.float32, copy=True)  # a CUDA graph overwrites it on replay
        self._loss_sum = loss if self._loss_sum is None else self._loss_sum + loss
        self._num_losses += 1
        self._samples += self.data.share.num_examples
        self._all_samples += self.data.share.total
        # A replay keeps the batch until the outcome has arrived.
        result = self.engine.step(replay=None if self.watch is None else compute)
        if result.boundary:
            self._record(result, epoch)

    def _record(self, result: StepResult, epoch: int) -> None:
        assert self._loss_sum is not None
        self._recorded = result.step
        self.recorder.push(
            result,
            mean_loss(self._loss_sum / self._num_losses, self._samples, self.context),
            epoch=epoch,
            micro_batch=self.engine.progress.micro_batches,
            samples=self._all_samples,
            batches=self._window.end_window(),
        )
        self.recorder.record_truth(self.engine)
        self._loss_sum = None
        self._num_losses = self._samples = self._all_samples = 0

    def _validate(self, stop: AgreedStop, *, epoch_done: bool) -> None:
        """Validate the epoch that is due; whatever ends the validation early, the trained weights are saved."""
        epoch = self.progress.unvalidated
        assert epoch is not None
        limit = self.config.eval_batches
        self.heartbeat.tick(f"the validation of epoch {epoch + 1}")
        arguments = (self.job, self.context, self.model, self.engine, self.validation_data, epoch)
        try:
            values = validate(*arguments, limit=limit, stopped=lambda: stop.requested, ranks=self.ranks)
            if not values:
                reject_metric_schedulers(self.engine, f"{self.job.describe('data')} returned None for split='val'")
        except BaseException as error:
            stopped = isinstance(error, ValidationStopped)  # on all ranks
            if self.checkpoints.saved_at != self.engine.progress.attempts and (stopped or not self.ranks.several):
                self._save(epoch_done=epoch_done)
            if stopped:
                stop.settle()
                return
            log_warning(
                f"Validation failed. The training up to step {self.engine.progress.attempts} is saved in {self.out}; "
                "once the validation works, continue with --resume."
            )
            raise
        self.progress = Progress(self.progress.epoch, values)
        if not values:
            return
        self.recorder.validated(epoch, self.engine.progress.attempts, values)
        self._finish_save()
        if self.checkpoints.saved_at == self.engine.progress.attempts:
            self.checkpoints.score(values)

    def _step_schedulers_on_metric(self, epoch: int) -> None:
        """Step schedulers such as ReduceLROnPlateau with the validation of the epoch before.

        At the start of an epoch, and not right after the validation, so that a checkpoint is the same whether its
        validation has finished or not: a resumed run continues from either with the same learning rate.
        """
        values, validated = self.progress.values, epoch > 0 and epoch % self.config.eval_every == 0
        if values and validated and not self.data.resumes_in(epoch):
            step_on_metric(self.engine, values.get("metric", values["loss"]))

    def _save(self, *, epoch_done: bool) -> None:
        self.recorder.flush(wait=True)
        self.heartbeat.tick(f"the checkpoint of step {self.engine.progress.attempts}")
        self._finish_save()
        path = self.checkpoints.save(self.engine, self.data, self.progress, epoch_done=epoch_done)
        if path is None:
            self.recorder.log.event("nonfinite", parameters=self.checkpoints.nonfinite)
        elif not self.config.async_save:
            self.recorder.saved(path)
        self.recorder.restart_clock()

    def _finish_save(self) -> None:
        path = self.checkpoints.finish(self.engine)
        if path is not None:
            self.recorder.saved(path)

    def _steps_done(self) -> bool:
        return self.config.steps is not None and self.engine.progress.attempts >= self.config.steps

    def _done(self, epoch: int) -> bool:
        return (self.config.epochs is not None and epoch >= self.config.epochs) or self._steps_done()

    def _outcome(self, stop: AgreedStop) -> TrainOutcome:
        engine, last, checkpoint = self.engine, self.recorder.last, self.checkpoints.latest
        if stop.signal is not None:
            log_info(
                f"Stopped by {stop.signal.name} after step {engine.progress.attempts}; saved {checkpoint}. Continue with --resume."
            )
        loss = None if last is None else last.loss
        problem = describe_problem(
            steps=engine.progress.attempts - self._before[0],
            applied=engine.progress.applied - self._before[1],
            loss=loss,
            scale=None if last is None else last.scale,
            validation=self.progress.values,
            nonfinite=self.checkpoints.nonfinite,
        )
        return TrainOutcome(
            self.out,
            str(engine.policy),
            engine.progress.attempts,
            self.progress.epoch,
            engine.progress.attempts - engine.progress.applied,
            loss,
            self.progress.values,
            checkpoint,
            None if stop.signal is None else stop.signal.name,
            problem,
            () if self.watch is None else summary_of(self.watch, engine.policy),
        )

    def close(self) -> None:
        try:
            self.engine.close()  # the Watch delivers its last events
        finally:
            self.recorder.close()
