"""The training loop over a Job: what `halfstep train` does, as one function.

Each epoch trains, validates and saves; a stop asked for by a signal ends the step, saves and returns. A run that is
resumed goes on bit for bit as if it had not been stopped: weights, masters, moments, loss scale, schedules, averages,
random numbers and the place in the data are all in the checkpoint.
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
from halfstep.checkpoint.directory import load_checkpoint
from halfstep.checkpoint.retention import CheckpointFolder
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.checkpoint.runlog import RunLog
from halfstep.engine.engine import Engine
from halfstep.engine.state import checkpoint_parts, load_engine_checkpoint
from halfstep.errors import SettingError
from halfstep.events import say
from halfstep.hardware.environment import environment
from halfstep.jobs.job import Job
from halfstep.train.config import TrainConfig, changed_fields
from halfstep.train.memory import PeakCounter, compare_memory
from halfstep.train.recorder import Observer, Recorder, SilentObserver
from halfstep.train.resume import Source
from halfstep.train.stop import StopRequest
from halfstep.train.stream import DataStream, to_device

__all__ = ["TrainOutcome", "train"]

CHECKPOINTS, RUN_FILE, BOARD = "checkpoints", "run.jsonl", "tensorboard"
# The place in the data when the next epoch has not begun: no epoch has this number.
_START = {"epoch": -1, "batch": 0, "rng": None, "first": None, "loader": None}


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
    stopped_by: str | None  # the signal's name, if one ended the run


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
    """Train `job` and write run file, checkpoints and TensorBoard logs under `out`; `source` says what loads the job again."""
    if config.steps is None and config.epochs is None:
        raise SettingError("The run has no end: give steps or epochs.")
    told: dict[str, Any] = {"command": list(command)} | (
        {} if source is None else {"source": dataclasses.asdict(source)}
    )
    run = _Run(job, config, precision, out, resume=resume, told=told, observer=observer or SilentObserver())
    with StopRequest() as stop:
        try:
            return run.go(stop)
        finally:
            run.close()


class _Run:
    """One run's objects; lives for one call of `train`."""

    def __init__(
        self,
        job: Job,
        config: TrainConfig,
        precision: str,
        out: Path,
        *,
        resume: bool,
        told: dict[str, Any],
        observer: Observer,
    ) -> None:
        self.job, self.config, self.out = job, config, out
        self.folder = CheckpointFolder(out / CHECKPOINTS, config.keep_last, config.keep_best)
        self.resumed = resume
        found = self._find(resume)
        torch.manual_seed(config.seed)
        self.context = RunContext.single(config.device, seed=config.seed, batch_size=config.batch)
        self.device = self.context.device
        self.memory = PeakCounter(self.device)
        self.model, self.engine = self._build(precision)
        self.data = DataStream(job, self.context, split="train")
        self.validation = DataStream(job, self.context, split="val")
        self.values: dict[str, float] = {}
        self.first_epoch = 0
        log = self._open_log(found, told)
        self.recorder = Recorder(log, observer, out / BOARD)
        self.saved: Path | None = found
        self.saved_at = -1  # the step of this attempt's last checkpoint
        if found is not None:
            self._resume(found)
        self._loss_sum: Tensor | None = None
        self._num_losses = self._samples = 0

    def _find(self, resume: bool) -> Path | None:
        found = self.folder.latest() if self.folder.root.exists() else None
        run_file = self.out / RUN_FILE
        if not resume:
            if run_file.exists() or found is not None:
                raise SettingError(f"{self.out} holds a run already; give --resume to go on with it, or another --out.")
            return None
        if found is None and not run_file.exists():
            raise SettingError(f"There is nothing to resume in {self.out}; start the run without --resume.")
        return found

    def _build(self, precision: str) -> tuple[nn.Module, Engine]:
        config, context = self.config, self.context
        model = self.job.call("model", context).to(self.device)
        optimizer = self.job.call("optimizer", context, model=model)
        scheduler = self.job.call("scheduler", context, optimizer=optimizer, model=model)
        engine = Engine(
            model,
            optimizer,
            precision,
            max_norm=config.max_norm,
            accumulate=config.accumulate,
            scheduler=scheduler,
            ema=config.ema,
            compile=config.compile,
            deterministic=config.deterministic,
            gradient_release=config.gradient_release,
        )
        return model, engine

    def _open_log(self, found: Path | None, told: dict[str, Any]) -> RunLog:
        path = self.out / RUN_FILE
        if path.exists() and (found is not None or path.stat().st_size):
            return RunLog(path)
        self.out.mkdir(parents=True, exist_ok=True)
        return RunLog.create(
            path,
            policy=str(self.engine.policy),
            truth=self.engine.truth().as_dict(),
            environment=environment(),
            config=dataclasses.asdict(self.config),
            **told,
        )

    def _resume(self, found: Path) -> None:
        checkpoint = load_checkpoint(found)
        extra = checkpoint.state["extra"]
        changed = changed_fields(extra["config"], self.config)
        if changed:
            raise SettingError(
                f"The run in {self.out} was started with other settings ({'; '.join(changed)}); resume with the same."
            )
        load_engine_checkpoint(self.engine, checkpoint)
        self.data.restore(extra["data"])
        self.first_epoch, self.values = extra["epoch"], extra["values"]
        self.recorder.start_from(skips=self.engine.attempts - self.engine.applied)

    def go(self, stop: StopRequest) -> TrainOutcome:
        engine, config = self.engine, self.config
        log = self.recorder.log
        if self.saved is not None or self.resumed:
            log.resume(attempted=engine.attempts, applied=engine.applied, micro_batch=engine.micro_batches)
        self.recorder.observer.started(engine, self._total_steps())
        epoch = self.first_epoch
        while not self._done(epoch) and not stop:
            ended = self._train_epoch(epoch, stop)
            self.recorder.flush(wait=True)
            if ended == "stop":
                break
            last = ended == "steps" or self._done(epoch + 1)
            validated = last or (epoch + 1) % config.eval_every == 0
            if validated:
                self._validate(epoch)
            if last or config.save_every is None:
                self._save(epoch, whole=ended == "epoch", validated=validated)
            if ended == "epoch":
                epoch += 1
            if last:
                break
        if stop and self.saved_at != engine.attempts:
            self._save(epoch, whole=False, validated=False)
        if (peak := self.memory.peak()) is not None and not stop:
            log.event("memory", **compare_memory(self.job, engine.policy, config, peak))
        return self._outcome(epoch, stop)

    def _train_epoch(self, epoch: int, stop: StopRequest) -> str:
        """Train one epoch; what ended it: its data ("epoch"), the limit of steps ("steps"), or a signal ("stop")."""
        config = self.config
        self.model.train()
        self.recorder.restart_clock()
        for batch in self.data.batches(epoch):
            self._micro_batch(to_device(batch, self.device), epoch)
            if self.engine.in_window:
                continue
            if self._steps_done():
                return "steps"
            if stop:
                return "stop"
            if config.save_every is not None and self.engine.attempts % config.save_every == 0:
                self._save(epoch, whole=False, validated=False)
        if self.engine.in_window:
            self._record(self.engine.step(last=True), epoch)
        return "epoch"

    def _micro_batch(self, batch: Any, epoch: int) -> None:
        with self.engine.forward():
            loss = self.job.call("loss", self.context, model=self.model, batch=batch, epoch=epoch, split="train")
        self.engine.backward(loss)
        loss = loss.detach().to(torch.float32, copy=True)  # a CUDA graph writes the next one over it
        self._loss_sum = loss if self._loss_sum is None else self._loss_sum + loss
        self._num_losses += 1
        self._samples += _batch_size(batch, self.config.batch)
        result = self.engine.step()
        if result.boundary:
            self._record(result, epoch)

    def _record(self, result: Any, epoch: int) -> None:
        assert self._loss_sum is not None
        self.recorder.push(
            result,
            self._loss_sum / self._num_losses,
            epoch=epoch,
            micro_batch=self.engine.micro_batches,
            samples=self._samples,
        )
        self.recorder.note_truth(self.engine)
        self._loss_sum, self._num_losses, self._samples = None, 0, 0

    def _validate(self, epoch: int) -> None:
        """Loss and metric over the validation split, weighed by the batches' sizes.

        The random numbers that validation draws (a DataLoader draws one by being iterated) are given back, so that when
        and how often a run is validated does not change its training.
        """
        random_numbers = rng_state()
        loss_sum = torch.zeros((), device=self.device, dtype=torch.float64)
        metric_sum = torch.zeros((), device=self.device, dtype=torch.float64)
        total = 0
        where = {"model": self.model, "epoch": epoch, "split": "val"}
        with self.engine.evaluate(ema=self.engine.ema is not None):
            for raw in self.validation.batches(epoch):
                batch = to_device(raw, self.device)
                size = _batch_size(batch, self.config.batch)
                loss_sum += self.job.call("loss", self.context, batch=batch, **where).detach().double() * size
                if self.job.metric is not None:
                    metric_sum += (
                        torch.as_tensor(
                            self.job.call("metric", self.context, batch=batch, **where), device=self.device
                        ).double()
                        * size
                    )
                total += size
        restore_rng(random_numbers)
        self.values = {"loss": (loss_sum / total).item()}
        if self.job.metric is not None:
            self.values["metric"] = (metric_sum / total).item()
        self.recorder.validated(epoch, self.engine.attempts, self.values)

    def _save(self, epoch: int, *, whole: bool, validated: bool) -> None:
        """Write a checkpoint in epoch `epoch`, of which all batches are used if it is `whole`."""
        self.recorder.flush(wait=True)
        extra = {
            "epoch": epoch + whole,
            "values": self.values,
            "config": dataclasses.asdict(self.config),
            "data": _START if whole else self.data.state(),
        }
        weights, state, meta = checkpoint_parts(self.engine, extra)
        metric, higher = self._score(validated=validated)
        self.saved = self.folder.save(
            self.engine.attempts, weights=weights, state=state, meta=meta, metric=metric, higher_is_better=higher
        )
        self.saved_at = self.engine.attempts
        self.recorder.log.event("saved", path=self.saved.name)
        self.recorder.observer.saved(self.saved)
        self.recorder.restart_clock()

    def _score(self, *, validated: bool) -> tuple[float | None, bool]:
        if not validated or not self.values:
            return None, self.config.higher_is_better if self.job.metric is not None else False
        if "metric" in self.values:
            return self.values["metric"], self.config.higher_is_better
        return self.values["loss"], False

    def _steps_done(self) -> bool:
        return self.config.steps is not None and self.engine.attempts >= self.config.steps

    def _done(self, epoch: int) -> bool:
        return (self.config.epochs is not None and epoch >= self.config.epochs) or self._steps_done()

    def _total_steps(self) -> int | None:
        """The steps the run will have taken at its end, if that can be known."""
        config, batches = self.config, self.data.num_batches(self.first_epoch)
        if config.epochs is None or batches is None:
            return config.steps
        total = config.epochs * -(-batches // config.accumulate)
        return total if config.steps is None else min(total, config.steps)

    def _outcome(self, epoch: int, stop: StopRequest) -> TrainOutcome:
        engine, last = self.engine, self.recorder.last
        if stop.signal is not None:
            say(f"Stopped by {stop.signal.name} after step {engine.attempts}; saved {self.saved}. Go on with --resume.")
        return TrainOutcome(
            self.out,
            str(engine.policy),
            engine.attempts,
            epoch,
            engine.attempts - engine.applied,
            None if last is None else last.loss,
            self.values,
            self.saved,
            None if stop.signal is None else stop.signal.name,
        )

    def close(self) -> None:
        self.recorder.close()
        self.engine.close()


def _batch_size(batch: Any, otherwise: int) -> int:
    """Examples in a batch: the first dimension of its first tensor."""
    from torch.utils import _pytree as pytree

    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    return otherwise
