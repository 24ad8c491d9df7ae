"""A folder of checkpoints that keeps the last few and the best few, and at every moment a complete one.

Each checkpoint is a directory `step-00001234`. The newest is the one saved last, not the one with the highest step,
because a run that went back to step 100 and saved step 150 must not resume from an abandoned step 200. Each
checkpoint stores its position in the order of saving, and its metric, in its `meta.json` under `folder`. A metric that is
known only later is added by `score`. Directories of other names, such as those of checkpoints that were written aside
because their weights are not finite, are left alone.

A new checkpoint is moved into place atomically (`directory.py`) before an old one is removed. An old one is first
renamed to `.tmp-*` and then deleted, so a crash never leaves a partial checkpoint under a valid name. Leftovers of a
crash are removed by the next `save` or `latest`, but never while another process on this machine is saving into the
folder. Only one process at a time may save into a folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from halfstep.checkpoint.atomic import TEMPORARY, folder_lock
from halfstep.checkpoint.directory import read_meta
from halfstep.checkpoint.saver import Saver
from halfstep.checkpoint.score import Score, read_score, write_score
from halfstep.errors import SettingError
from halfstep.events import log_warning

__all__ = ["CheckpointFolder", "SavedCheckpoint"]

_NAME = re.compile(r"step-(\d{8,})(-\d+)?")
_KEY = "folder"  # the entry of meta.json that CheckpointFolder writes


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint of a folder; `order` counts the saves, `metric` is None if none was passed."""

    path: Path
    step: int
    order: int
    metric: float | None
    higher_is_better: bool


class CheckpointFolder:
    """Saves checkpoints under `root`, keeping the last `keep_last` (None: all) and the best `keep_best` by metric."""

    def __init__(self, root: str | Path, keep_last: int | None = 3, keep_best: int = 1) -> None:
        if keep_last is not None and keep_last < 1:
            raise SettingError(
                f"keep_last={keep_last}: the newest checkpoint is always kept; use 1 or more, or None for all."
            )
        if keep_best < 0:
            raise SettingError(f"keep_best={keep_best} must be at least 0; use 0 to keep no best checkpoint.")
        self.root = Path(root)
        self.keep_last = keep_last
        self.keep_best = keep_best

    def save(
        self,
        step: int,
        *,
        weights: Mapping[str, Tensor],
        state: Any,
        meta: Mapping[str, Any],
        metric: float | None = None,
        higher_is_better: bool = True,
        own: Mapping[str, Any] = MappingProxyType({}),
        saver: Saver | None = None,
        wait: bool = True,
    ) -> Path:
        """Write the checkpoint of `step`, then remove those that are neither among the last nor among the best.

        With `saver`, its ranks write together, each with what it has for itself in `own`, and without `wait` in the background:
        old checkpoints are removed once the new one is in place.
        """
        saver = saver or Saver()
        saver.finish()
        planned: dict[str, Any] = saver.ranks.on_main(lambda: self._plan(step, meta, metric, higher_is_better))
        path = self.root / planned["name"]
        return saver.save(
            path,
            weights=weights,
            state=state,
            own=own,
            meta={**meta, _KEY: planned["entry"]},
            wait=wait,
            then=self._rotate,
        )

    def _plan(self, step: int, meta: Mapping[str, Any], metric: float | None, higher_is_better: bool) -> dict[str, Any]:
        """The name of a new checkpoint and its entry in `meta.json`."""
        if step < 0:
            raise SettingError(f"step={step} must be at least 0; pass the number of applied steps.")
        if _KEY in meta:
            raise SettingError(f"meta has the key {_KEY!r}, which CheckpointFolder writes itself; use another name.")
        self._clear_leftovers()
        earlier = self.checkpoints()
        self._require_comparable(earlier, metric, higher_is_better=higher_is_better)
        order = 1 + max((other.order for other in earlier), default=0)
        entry = {
            "step": step,
            "order": order,
            "metric": None if metric is None else float(metric),
            "higher_is_better": higher_is_better,
        }
        return {"name": self._free_path(step).name, "entry": entry}

    def score(self, path: Path, score: Score) -> None:
        """Rank a saved checkpoint by a validation that came after it, then remove those that are no longer needed."""
        others = [entry for entry in self.checkpoints() if entry.path != path]
        self._require_comparable(others, score.metric, higher_is_better=score.higher_is_better)
        write_score(path, score)
        self._rotate()

    def _require_comparable(
        self, others: list[SavedCheckpoint], metric: float | None, *, higher_is_better: bool
    ) -> None:
        for other in others:
            if metric is not None and other.metric is not None and other.higher_is_better != higher_is_better:
                raise SettingError(
                    f"higher_is_better={higher_is_better}, but {other.path.name} in {self.root} was saved with "
                    f"{other.higher_is_better}: their metrics cannot be compared. Use one metric per folder, or "
                    "another folder."
                )

    def checkpoints(self) -> list[SavedCheckpoint]:
        """The complete checkpoints of the folder in the order of saving; damaged ones are left out."""
        return self._scan()[0]

    def latest(self, *, clean: bool = True) -> Path | None:
        """The newest complete checkpoint, or None; warns about damaged ones that it skips.

        Complete means that the manifest is intact and every file exists with its size; `load_checkpoint` verifies the
        bytes. `clean` removes leftovers of interrupted saves; disable it if another machine may be saving.
        """
        if clean:
            self._clear_leftovers()
        complete, problems = self._scan()
        for problem in problems:
            log_warning(f"Skipping a checkpoint: {problem}")
        return complete[-1].path if complete else None

    def best(self) -> Path | None:
        """The complete checkpoint with the best metric, or None if none has one; the latest of equals."""
        ranked = self._ranked(self.checkpoints())
        return ranked[0].path if ranked else None

    def _ranked(self, entries: list[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Best first; a checkpoint without a metric, or whose metric is NaN, is never the best."""
        scored = [
            (entry.metric if entry.higher_is_better else -entry.metric, entry.order, entry)
            for entry in entries
            if entry.metric is not None and not math.isnan(entry.metric)
        ]
        return [entry for *_, entry in sorted(scored, key=operator.itemgetter(0, 1), reverse=True)]

    def _scan(self) -> tuple[list[SavedCheckpoint], list[str]]:
        complete, problems = [], []
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else []:
            if not _NAME.fullmatch(path.name):
                continue
            try:
                entry = SavedCheckpoint(path, **read_meta(path)[_KEY])
                score = read_score(path)
                if score is not None:
                    entry = dataclasses.replace(entry, metric=score.metric, higher_is_better=score.higher_is_better)
                complete.append(entry)
            except SettingError as error:
                problems.append(str(error))
            except (KeyError, TypeError):
                problems.append(f"{path} was not saved by CheckpointFolder; load it by its path.")
        return sorted(complete, key=lambda entry: entry.order), problems

    def _free_path(self, step: int) -> Path:
        path, attempt = self.root / f"step-{step:08d}", 1
        while path.exists():  # a run that went back saves the same step again
            attempt += 1
            path = self.root / f"step-{step:08d}-{attempt}"
        return path

    def _rotate(self) -> None:
        entries = self.checkpoints()
        last = entries if self.keep_last is None else entries[-self.keep_last :]
        retained = {entry.path for entry in [*last, *self._ranked(entries)[: self.keep_best]]}
        with folder_lock(self.root, exclusive=False):
            for entry in entries:
                if entry.path not in retained:
                    self._remove(entry.path)

    def _remove(self, path: Path) -> None:
        aside = self.root / f"{TEMPORARY}{secrets.token_hex(8)}"
        try:
            path.rename(aside)
            shutil.rmtree(aside)
        except OSError as error:  # the new checkpoint is safe; an extra old one is no reason to stop a run
            log_warning(
                f"The old checkpoint {path} could not be removed: {error.strerror or error}. Delete it manually."
            )

    def _clear_leftovers(self) -> None:
        if not self.root.is_dir():
            return
        with contextlib.suppress(OSError), folder_lock(self.root, exclusive=True) as alone:
            for path in self.root.glob(f"{TEMPORARY}*") if alone else []:
                shutil.rmtree(path, ignore_errors=True)
