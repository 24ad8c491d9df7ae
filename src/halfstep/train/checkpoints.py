"""The checkpoints of one run: which one to resume from, what they contain besides the engine, and how they are ranked.

A checkpoint is written before its weights are validated and gets its score afterwards; one whose validation was due but
did not finish is validated when the run resumes. Weights that are not finite are written aside, as `nonfinite-STEP`, where
nothing resumes from them and no healthy checkpoint is removed for them; only the first is written, which is the closest
to the cause.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from halfstep.backends.consistency import compare_ranks
from halfstep.backends.ranks import Ranks
from halfstep.checkpoint.directory import open_checkpoint
from halfstep.checkpoint.retention import CheckpointFolder
from halfstep.checkpoint.saver import Saver
from halfstep.checkpoint.score import Score, read_score
from halfstep.engine.engine import Engine
from halfstep.engine.saved.checkpoint import checkpoint_parts, nonfinite_weights
from halfstep.errors import SettingError
from halfstep.events import log_warning
from halfstep.hardware.units import few
from halfstep.train.config import TrainConfig, changed_fields
from halfstep.train.resume import RUN_FILE
from halfstep.train.stream import DataStream
from halfstep.watching.watch import Watch

__all__ = ["Progress", "RunCheckpoints", "check_out"]

CHECKPOINTS = "checkpoints"  # in the directory of a run
ASIDE = "nonfinite-"  # start of the names of checkpoints with non-finite weights
T = TypeVar("T")
# The data position between two epochs: no epoch has this number.
_BETWEEN_EPOCHS = {"epoch": -1, "batch": 0, "rng": None, "first": None, "loader": None}


@dataclass(frozen=True)
class Progress:
    """Where a run stands: the epoch in progress, or the next one, and the last validation."""

    epoch: int = 0
    values: dict[str, float] = field(default_factory=dict)
    unvalidated: int | None = None  # the epoch whose validation is due but not done


def check_out(out: Path) -> None:
    """Raise if `out` cannot be the directory of a run; leaves nothing behind."""
    existing = out
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise SettingError(f"--out {out}: {existing} is not a directory; pass another --out.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise SettingError(f"--out {out}: no permission to write to {existing}; pass another --out.")
    try:  # permission is not enough in /proc, on a full disk and for root
        Path(tempfile.mkdtemp(prefix=".halfstep-", dir=existing)).rmdir()
    except OSError as error:
        raise SettingError(
            f"--out {out}: nothing can be created in {existing} ({error.strerror or error}); pass another --out."
        ) from error


class RunCheckpoints:
    """Finds, restores and writes the checkpoints of one run; `latest` is the newest healthy one."""

    def __init__(
        self, out: Path, config: TrainConfig, ranks: Ranks | None = None, *, resume: bool, has_metric: bool
    ) -> None:
        ranks = ranks or Ranks()
        self._out, self._config, self._ranks, self._has_metric = out, config, ranks, has_metric
        self._folder = CheckpointFolder(out / CHECKPOINTS, config.keep_last, config.keep_best)
        self.latest = ranks.on_main(lambda: self._find(resume=resume))
        state = "exists" if self.latest and self.latest.exists() else "missing"
        compare_ranks({"the checkpoint": f"{self.latest} {state}"}, ranks)
        self.saved_at = -1  # the step of the last checkpoint that this process wrote, healthy or not
        self.nonfinite: list[str] = []  # parameters that were not finite at that save
        self._watch: Watch | None = None
        self._pending: Path | None = None  # a checkpoint that is being written in the background

    def _find(self, *, resume: bool) -> Path | None:
        check_out(self._out)
        latest = self._folder.latest() if self._folder.root.exists() else None
        exists = latest is not None or (self._out / RUN_FILE).exists()
        if exists and not resume:
            raise SettingError(
                f"{self._out} already contains a run; pass --resume to continue it, or use another --out."
            )
        if resume and not exists:
            raise SettingError(f"There is nothing to resume in {self._out}; start the run without --resume.")
        if resume and latest is None:
            log_warning(f"There is no whole checkpoint in {self._out}: the run starts again at step 0.")
        return latest

    def restore(self, engine: Engine, data: DataStream, watch: Watch | None = None) -> Progress:
        """Load the latest checkpoint; without one the run starts from the beginning."""
        self._watch = watch
        if self.latest is None:
            return Progress()
        with open_checkpoint(self.latest, self._ranks) as checkpoint:
            changed = changed_fields(checkpoint.state["extra"]["config"], self._config)
            if changed:
                raise SettingError(
                    f"The run in {self._out} was started with other settings ({'; '.join(changed)}); resume with the same ones."
                )
            extra = engine.load(checkpoint)
        data.restore(extra["data"])
        if watch is not None and extra.get("watch") is not None:
            watch.load_state_dict(extra["watch"])
        self.saved_at = engine.progress.attempts
        score = read_score(self.latest)
        if score is not None:
            return Progress(extra["epoch"], score.values)
        return Progress(extra["epoch"], extra["values"], extra.get("unvalidated"))

    def save(self, engine: Engine, data: DataStream, progress: Progress, *, epoch_done: bool) -> Path | None:
        """Write a checkpoint; `epoch_done` if `progress` is between two epochs. None if its weights are not finite.

        With `async_save` it is the latest only after `finish`.
        """
        self.finish(engine)
        position = _BETWEEN_EPOCHS if epoch_done else data.state()
        extra = {
            "epoch": progress.epoch,
            "values": progress.values,
            "unvalidated": progress.unvalidated,
            "config": dataclasses.asdict(self._config),
            "data": position,
            "watch": None if self._watch is None else self._watch.state_dict(),
        }
        step, saver = engine.progress.attempts, engine.saver
        saved = engine.state_to_save()
        self.nonfinite = list(nonfinite_weights(saved, saver.ranks))
        self.saved_at = step
        parts = checkpoint_parts(saved, extra, {})
        if self.nonfinite:
            self._write_aside(step, saver, parts)
            return None
        _, higher = self._rank({})
        wait = not self._config.async_save
        path = self._folder.save(step, **parts, higher_is_better=higher, saver=saver, wait=wait)
        self.latest, self._pending = (path, None) if wait else (self.latest, path)
        return path

    def _write_aside(self, step: int, saver: Saver, parts: dict[str, Any]) -> None:
        """Write the first checkpoint whose weights are not finite."""
        names = saver.ranks.on_main(lambda: sorted(path.name for path in self._folder.root.glob(f"{ASIDE}*")))
        earlier = self._folder.root / names[0] if names else None
        path = earlier or saver.save(self._folder.root / f"{ASIDE}{step:08d}", **parts)
        log_warning(
            f"After step {step} the weights are not finite (in {few(self.nonfinite)}). "
            + (
                f"{path} was written aside and is never resumed from"
                if earlier is None
                else f"{path} has the first of them"
            )
            + f"; the last healthy checkpoint is {self.latest or 'missing'}."
        )

    def finish(self, engine: Engine) -> Path | None:
        """Wait for a save in the background, if there is one, and return its checkpoint, which is the latest now."""
        path, self._pending = self._pending, None
        if path is not None:
            engine.finish_save()
        self.latest = path or self.latest
        return path

    def score(self, values: dict[str, float]) -> None:
        """Rank the latest checkpoint by the validation of its weights."""
        latest = self.latest
        if latest is not None and not self.nonfinite:
            self._ranks.on_main(lambda: self._folder.score(latest, Score(*self._rank(values), values)))

    def _rank(self, values: dict[str, float]) -> tuple[float | None, bool]:
        """The value that ranks a checkpoint, and whether a higher one is better."""
        if "metric" in values:
            return values["metric"], self._config.higher_is_better
        if values:
            return values["loss"], False
        return None, self._has_metric and self._config.higher_is_better
