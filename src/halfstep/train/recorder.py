"""Where a run writes what happens: the run file, TensorBoard if it is installed, and whoever listens.

Losses are read back like everything else: pushed behind the step that made them and written when they arrive, so that
logging every step costs no wait.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from halfstep.checkpoint.runlog import RunLog
from halfstep.engine.engine import Engine
from halfstep.engine.result import StepResult
from halfstep.scaling.readback import Readback

__all__ = ["Observer", "Recorder", "SilentObserver", "StepLine"]


@dataclass(frozen=True)
class StepLine:
    """One optimizer step as it is shown and recorded."""

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
    """Somebody who shows a run while it goes on."""

    def started(self, engine: Engine, total_steps: int | None) -> None:
        """The run begins."""

    def stepped(self, line: StepLine) -> None:
        """A step's outcome has arrived."""

    def validated(self, epoch: int, values: dict[str, float]) -> None:
        """A validation is done."""

    def saved(self, path: Path) -> None:
        """A checkpoint is whole."""


class SilentObserver:
    """A observer that shows nothing."""

    def started(self, engine: Engine, total_steps: int | None) -> None:
        """Nothing."""

    def stepped(self, line: StepLine) -> None:
        """Nothing."""

    def validated(self, epoch: int, values: dict[str, float]) -> None:
        """Nothing."""

    def saved(self, path: Path) -> None:
        """Nothing."""


class Recorder:
    """Collects losses and outcomes, and writes one line per optimizer step."""

    def __init__(self, log: RunLog, observer: Observer, tensorboard: Path | None) -> None:
        self.log, self.observer = log, observer
        self._board = _board(tensorboard)
        self._losses = Readback()
        self._started = time.perf_counter()
        self._skips = 0
        self.last: StepLine | None = None

    def note_truth(self, engine: Engine) -> None:
        """Record the truth table as the first step left it; the file's first line had to be written before it."""
        if engine.attempts == 1:
            self.log.event("truth", truth=engine.truth().as_dict())

    def push(self, result: StepResult, loss: Tensor, *, epoch: int, micro_batch: int, samples: int) -> None:
        """Note a step; it is written when its values have arrived."""
        now = time.perf_counter()
        rate = samples / max(now - self._started, 1e-9)
        self._started = now
        self._losses.push(loss.detach().float().reshape(1), (result, epoch, micro_batch, rate))
        self.flush(wait=False)

    def flush(self, *, wait: bool) -> None:
        """Write what has arrived."""
        for (result, epoch, micro_batch, rate), (loss,) in self._losses.deliver(wait=wait):
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
            self._scalars(
                "train", {"loss": loss, "lr": line.lr, "scale": line.scale or 1.0, "skips": self._skips}, line.step
            )
            self.last = line
            self.observer.stepped(line)

    def start_from(self, *, skips: int) -> None:
        """Go on counting from a resumed run."""
        self._skips = skips

    def restart_clock(self) -> None:
        """Leave what came in between (validation, saving) out of the next step's speed."""
        self._started = time.perf_counter()

    def validated(self, epoch: int, step: int, values: dict[str, float]) -> None:
        """Note a validation."""
        self.log.event("validation", epoch=epoch, **values)
        self._scalars("val", values, step)
        self.observer.validated(epoch, values)

    def close(self) -> None:
        """Write everything and close the files."""
        self.flush(wait=True)
        self.log.close()
        if self._board is not None:
            self._board.close()

    def _scalars(self, group: str, values: dict[str, float], step: int) -> None:
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{group}/{name}", value, step)


def _board(folder: Path | None) -> Any:
    if folder is None:
        return None
    with contextlib.suppress(ImportError):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder))
    return None
