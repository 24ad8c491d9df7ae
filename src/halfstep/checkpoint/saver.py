"""Saver: writes the checkpoints of one run, with the other ranks if there are any, and on request in the background.

A save in the background copies the tensors to host memory (`snapshot.py`) and returns; a thread hashes, writes, syncs and
renames. There is one such save at a time: the next one waits for it, and so does `finish`. An error of the thread is
logged when it happens and raised by the next `save` or `finish`. The thread is not a daemon, so that a program that ends
without `finish` still completes its last checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from halfstep.backends.ranks import Ranks
from halfstep.checkpoint.atomic import check_target
from halfstep.checkpoint.contents import Contents, checkpoint_contents, write_contents
from halfstep.checkpoint.snapshot import Snapshot
from halfstep.events import log_warning

__all__ = ["Saver"]

_T = TypeVar("_T")


class Saver:
    """Saves into checkpoint directories; every rank must call the same methods in the same order."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        path: str | Path,
        *,
        weights: Mapping[str, Tensor],
        state: Any,
        own: Mapping[str, Any],
        meta: Mapping[str, Any],
        overwrite: bool = False,
        wait: bool = True,
        then: Callable[[], None] | None = None,
    ) -> Path:
        """Write a checkpoint to `path`; without `wait`, return when the tensors are copied and write in the background.

        `own` is what each rank has for itself, the rest is what they have in common (`contents.py`). `then()` is called on
        rank 0 once the checkpoint is in place, in the thread that wrote it.
        """
        self.finish()
        path = Path(path)
        contents = self._on_all(
            lambda: checkpoint_contents(weights=weights, state=state, own=own, meta=meta, ranks=self.ranks)
        )
        self.ranks.lead(lambda: check_target(path, overwrite=overwrite))
        if wait:
            self._write(contents, path, overwrite, then)
            return path
        copies, ready = self._on_all(lambda: self._snapshot.copy(contents))

        def work() -> None:
            try:
                self._on_all(ready)
                self._write(copies, path, overwrite, then)
            except BaseException as error:  # it is raised in the thread that saves next
                self._error = error
                log_warning(f"The checkpoint {path} was not saved: {error}")

        self._thread = threading.Thread(target=work, name=f"halfstep-save-{path.name}")
        self._thread.start()
        return path

    def _on_all(self, work: Callable[[], _T]) -> _T:
        """Do work of this rank; if it fails on any rank, all raise, so that none waits for the others."""
        results: list[_T] = []
        self.ranks.together(lambda: results.append(work()))
        return results[0]

    @property
    def busy(self) -> bool:
        """Whether a save is being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the save in the background, if there is one; raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, contents: Contents, path: Path, overwrite: bool, then: Callable[[], None] | None) -> None:
        write_contents(contents, path, overwrite=overwrite, ranks=self.ranks)
        if then is not None:
            self.ranks.lead(then)
