"""TensorBoard, Weights & Biases, MLflow and trackio: one small class each, all fed from the events and numbers of a run.

    halfstep train job.py --logger wandb --logger mlflow                          # every curve of docs/watch.md
    HalfstepCallback(outlets=[WandbLogger()])                                     # events of a run that another library owns

As an outlet, a logger writes into the run that the library has open already, as transformers' Trainer does with
`report_to="wandb"`, or else starts one at the first event. Only rank 0 writes. No logger waits for its server at a step.

A run that resumes from a checkpoint repeats steps. W&B drops values whose step is lower than the last, so steps are a metric
there, "halfstep/step", which its charts use as the x axis; the others accept any step.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from halfstep.backends.launch import read_launch
from halfstep.errors import MissingError, SettingError, unknown
from halfstep.hardware.torch_build import require
from halfstep.integrations.sending import Sender
from halfstep.integrations.versions import warn_if_untested
from halfstep.train.board import Board
from halfstep.train.writer import Histogram, OpenWriter, RunInfo, TensorBoardWriter
from halfstep.watching.events import Event

__all__ = ["LOGGERS", "Logger", "MlflowLogger", "TensorBoardLogger", "TrackioLogger", "WandbLogger", "parse_logger"]

_PROJECT = "halfstep"  # where neither the caller nor the environment names one
_STEP = "halfstep/step"
_MLFLOW_LIMIT = 1000  # metrics in one request


class Logger:
    """A writer of `halfstep train`, and an outlet of the callbacks in `halfstep.integrations`.

    `project` is what the library groups runs by; without one, the library's environment variable, then "halfstep".
    """

    library = extra = package = variable = ""

    def __init__(self, project: str | None = None, *, info: RunInfo | None = None) -> None:
        check_installed(self.library, type(self).__name__, self.extra)
        if self.package:
            warn_if_untested(self.package)
        self._project = project or os.environ.get(self.variable) or _PROJECT
        self._info = info
        self._board = Board([self])

    def __call__(self, event: Event) -> None:
        """Write an event: how many of its kind there were, and its message."""
        if _is_main():
            self._board.event(event)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write one value for each tag."""
        raise NotImplementedError

    def histogram(self, tag: str, histogram: Histogram, step: int) -> None:
        """Ignore it, where the library has no histograms."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Write a message."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is pending, and end the run if this logger has started it."""
        if "_run" in vars(self):
            self._close()

    @functools.cached_property
    def _run(self) -> Any:
        """The run of the library; opened by the first access."""
        return self._open()

    def _open(self) -> Any:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    @property
    def _config(self) -> dict[str, Any]:
        return {} if self._info is None else {"precision": self._info.policy, **self._info.config}


class TensorBoardLogger(Logger):
    """TensorBoard, in a directory: as an outlet only, because `halfstep train` writes it by itself where it is installed."""

    library, extra = "tensorboard", "tensorboard"

    def __init__(self, folder: str | Path = "runs/halfstep") -> None:
        super().__init__(str(folder))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """One point for each tag."""
        self._run.scalars(values, step)

    def histogram(self, tag: str, histogram: Histogram, step: int) -> None:
        """A distribution."""
        self._run.histogram(tag, histogram, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """A message, on the Text page."""
        self._run.text(tag, text, step)

    def _open(self) -> TensorBoardWriter:
        from torch.utils.tensorboard import SummaryWriter

        return TensorBoardWriter(SummaryWriter(self._project))

    def _close(self) -> None:
        self._run.close()


class WandbLogger(Logger):
    """Weights & Biases; `WANDB_MODE=offline` and its other variables apply."""

    library = extra = package = "wandb"
    variable = "WANDB_PROJECT"

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """One row, with its step as a column."""
        self._log(values, step)

    def histogram(self, tag: str, histogram: Histogram, step: int) -> None:
        """A distribution."""
        counts = list(histogram.counts), list(histogram.edges)
        self._log({tag: self._wandb.Histogram(np_histogram=counts)}, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """A message, under `text/`: a tag of W&B has one type."""
        self._log({f"text/{tag}": text}, step)

    @functools.cached_property
    def _wandb(self) -> Any:
        return require(self.library, type(self).__name__, self.extra)

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        run = self._run
        for group in {tag.partition("/")[0] for tag in values} - self._groups:
            self._groups.add(group)
            run.define_metric(f"{group}/*", step_metric=_STEP)
        run.log({**values, _STEP: step})

    def _open(self) -> Any:
        self._groups: set[str] = set()
        self._joined = self._info is None and self._wandb.run is not None
        if self._joined:
            run = self._wandb.run
        elif self._info is None:
            run = self._wandb.init(project=self._project)
        else:
            # A resumed run continues under its id.
            settings = {
                "id": self._info.run_id,
                "resume": "allow",
                "name": self._info.out.name,
                "dir": str(self._info.out),
            }
            run = self._wandb.init(project=self._project, config=self._config, **settings)
        run.define_metric(_STEP, hidden=True)
        return run

    def _close(self) -> None:
        if not self._joined:
            self._run.finish(exit_code=int(_is_failing()))


class MlflowLogger(Logger):
    """MLflow, through its client; `MLFLOW_TRACKING_URI` and its other variables apply."""

    library, extra, package = "mlflow", "mlflow", "mlflow-skinny"
    variable = "MLFLOW_EXPERIMENT_NAME"

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """A point of each metric, sent in the background."""
        run, now = self._run, round(time.time() * 1000)
        self._metrics += [self._mlflow.entities.Metric(tag, float(value), now, step) for tag, value in values.items()]
        self._sender.submit(lambda: self._write_metrics(run))

    def text(self, tag: str, text: str, step: int) -> None:
        """A message, in the artifact halfstep_messages.txt; of many messages, the last are written by `close()`."""
        run = self._run
        self._texts.append(f"{tag}: {text}" if "\n" not in text else f"{tag}, step {step}:\n{text}")
        if len(self._texts) <= 100:
            self._submit_texts(run)

    def _open(self) -> str:
        mlflow = require(self.library, type(self).__name__, self.extra)
        self._mlflow, self._client, self._sender = mlflow, mlflow.MlflowClient(), Sender("halfstep-mlflow")
        self._metrics, self._texts = deque[Any](), list[str]()
        active = mlflow.active_run()
        self._joined = self._info is None and active is not None
        if self._joined:
            return str(active.info.run_id)
        experiment = self._client.get_experiment_by_name(self._project)
        place = experiment.experiment_id if experiment is not None else self._client.create_experiment(self._project)
        if self._info is None:
            return str(self._client.create_run(place).info.run_id)
        tag = "halfstep_run"
        earlier = self._client.search_runs([place], f"tags.`{tag}` = '{self._info.run_id}'")
        if earlier:
            run_id = str(earlier[0].info.run_id)
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        created = self._client.create_run(place, tags={tag: self._info.run_id}, run_name=self._info.out.name)
        params = [mlflow.entities.Param(name, str(value)) for name, value in self._config.items()]
        self._client.log_batch(created.info.run_id, params=params)
        return str(created.info.run_id)

    def _close(self) -> None:
        if self._texts:
            self._submit_texts(self._run)
        self._sender.close()
        if not self._joined:
            self._client.set_terminated(self._run, "FAILED" if _is_failing() else "FINISHED")

    def _write_metrics(self, run: str) -> None:
        """Send what is pending, of several steps at once where the server is slow."""
        while self._metrics:
            batch = [self._metrics.popleft() for _ in range(min(len(self._metrics), _MLFLOW_LIMIT))]
            self._client.log_batch(run, metrics=batch)

    def _submit_texts(self, run: str) -> None:
        text = "\n".join(self._texts) + "\n"
        self._sender.submit(lambda: self._client.log_text(run, text, "halfstep_messages.txt"))


class TrackioLogger(Logger):
    """trackio, which stores runs on this machine, or in a Space with `TRACKIO_SPACE_ID`."""

    library = extra = package = "trackio"
    variable = "TRACKIO_PROJECT"

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """A point of each metric."""
        self._run.log(dict(values), step=step)

    def histogram(self, tag: str, histogram: Histogram, step: int) -> None:
        """A distribution."""
        run = self._run
        counts = list(histogram.counts), list(histogram.edges)
        run.log({tag: self._trackio.Histogram(np_histogram=counts)}, step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        """A message."""
        run = self._run
        run.log({f"text/{tag}": self._trackio.Markdown(text)}, step=step)

    def _open(self) -> Any:
        self._trackio = require(self.library, type(self).__name__, self.extra)
        active = self._trackio.context_vars.current_run.get()
        self._joined = self._info is None and active is not None
        if self._joined:
            return active
        with _printing_to_stderr():
            if self._info is None:
                return self._trackio.init(project=self._project, embed=False)
            # Runs are continued by name, so that it must be the name of one run only.
            name = f"{self._info.out.name}-{self._info.run_id[-6:]}"
            config = {key: str(value) if isinstance(value, Path) else value for key, value in self._config.items()}
            return self._trackio.init(project=self._project, name=name, config=config, resume="allow", embed=False)

    def _close(self) -> None:
        if not self._joined:
            is_current = self._trackio.context_vars.current_run.get() is self._run
            with _printing_to_stderr():
                (self._trackio if is_current else self._run).finish()  # trackio's own forgets the run, too


LOGGERS: dict[str, type[Logger]] = {
    "mlflow": MlflowLogger,
    "tensorboard": TensorBoardLogger,
    "trackio": TrackioLogger,
    "wandb": WandbLogger,
}


def parse_logger(text: str) -> OpenWriter | None:
    """What opens the logger of `--logger NAME[:PROJECT]`; None for TensorBoard, which a run writes by itself."""
    name, _, project = text.partition(":")
    if name not in LOGGERS:
        raise unknown("logger", name, LOGGERS, "Pass one of them: --logger NAME or --logger NAME:PROJECT.")
    logger = LOGGERS[name]
    check_installed(logger.library, f"--logger {name}", logger.extra)
    if logger is not TensorBoardLogger:
        return functools.partial(_open_logger, logger, project or None)
    if project:
        raise SettingError(f"--logger {text}: TensorBoard has no projects; write --logger tensorboard.")
    return None


def check_installed(library: str, feature: str, extra: str) -> None:
    """Raise a MissingError with the line that installs a library, without importing it."""
    if library not in sys.modules and importlib.util.find_spec(library) is None:
        raise MissingError(f'{feature} needs {library}, which is not installed. Run: pip install "halfstep[{extra}]"')


def _open_logger(logger: Callable[..., Logger], project: str | None, info: RunInfo) -> Logger:
    """Open a logger for a run; what is wrong with its account or its store ends the run before it starts."""
    opened = logger(project, info=info)
    try:
        opened._run  # noqa: B018, SLF001 - opens it
    except Exception as error:
        raise SettingError(
            f"{type(opened).__name__} cannot be opened: {type(error).__name__}: {error} Fix this, or train without --logger."
        ) from error
    return opened


def _is_main() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return read_launch().is_main


def _is_failing() -> bool:
    """Whether an exception ends the run; a logger is closed on its way out."""
    return sys.exc_info()[0] is not None


@contextlib.contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Standard output belongs to the result of the command."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
