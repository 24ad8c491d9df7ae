"""The checkpoints of one run: which one to resume from, what they contain besides the engine, and how they are ranked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from halfstep.checkpoint.directory import load_checkpoint
from halfstep.checkpoint.retention import CheckpointFolder
from halfstep.engine.engine import Engine
from halfstep.engine.state import checkpoint_parts
from halfstep.errors import SettingError
from halfstep.train.config import TrainConfig, changed_fields
from halfstep.train.resume import RUN_FILE
from halfstep.train.stream import DataStream

__all__ = ["Progress", "RunCheckpoints"]

CHECKPOINTS = "checkpoints"  # in the directory of a run
# The data position between two epochs: no epoch has this number.
_BETWEEN_EPOCHS = {"epoch": -1, "batch": 0, "rng": None, "first": None, "loader": None}


@dataclass(frozen=True)
class Progress:
    """Where a run stands: the epoch in progress, or the next one, and the last validation."""

    epoch: int = 0
    values: dict[str, float] = field(default_factory=dict)


class RunCheckpoints:
    """Finds, restores and writes the checkpoints of one run; `latest` is the newest one."""

    def __init__(self, out: Path, config: TrainConfig, *, resume: bool, has_metric: bool) -> None:
        self._out, self._config, self._has_metric = out, config, has_metric
        self._folder = CheckpointFolder(out / CHECKPOINTS, config.keep_last, config.keep_best)
        self.latest = self._find(resume=resume)
        self.saved_at = -1  # the step of the last checkpoint that this process wrote

    def _find(self, *, resume: bool) -> Path | None:
        latest = self._folder.latest() if self._folder.root.exists() else None
        exists = latest is not None or (self._out / RUN_FILE).exists()
        if exists and not resume:
            raise SettingError(
                f"{self._out} already contains a run; pass --resume to continue it, or use another --out."
            )
        if resume and not exists:
            raise SettingError(f"There is nothing to resume in {self._out}; start the run without --resume.")
        return latest

    def restore(self, engine: Engine, data: DataStream) -> Progress:
        """Load the latest checkpoint; without one the run starts from the beginning."""
        if self.latest is None:
            return Progress()
        checkpoint = load_checkpoint(self.latest)
        extra = checkpoint.state["extra"]
        changed = changed_fields(extra["config"], self._config)
        if changed:
            raise SettingError(
                f"The run in {self._out} was started with other settings ({'; '.join(changed)}); resume with the same ones."
            )
        engine.load(checkpoint)
        data.restore(extra["data"])
        return Progress(extra["epoch"], extra["values"])

    def save(self, engine: Engine, data: DataStream, progress: Progress, *, epoch_done: bool, validated: bool) -> Path:
        """Write a checkpoint; `epoch_done` if all batches of the epoch were used, `validated` if it may be the best."""
        extra = {
            "epoch": progress.epoch + epoch_done,
            "values": progress.values,
            "config": dataclasses.asdict(self._config),
            "data": _BETWEEN_EPOCHS if epoch_done else data.state(),
        }
        weights, state, meta = checkpoint_parts(engine.state_dict(), extra)
        metric, higher = self._score(progress.values if validated else {})
        self.latest = self._folder.save(
            engine.progress.attempts, weights=weights, state=state, meta=meta, metric=metric, higher_is_better=higher
        )
        self.saved_at = engine.progress.attempts
        return self.latest

    def _score(self, values: dict[str, float]) -> tuple[float | None, bool]:
        """The value that ranks a checkpoint, and whether a higher one is better."""
        if "metric" in values:
            return values["metric"], self._config.higher_is_better
        if values:
            return values["loss"], False
        return None, self._has_metric and self._config.higher_is_better
