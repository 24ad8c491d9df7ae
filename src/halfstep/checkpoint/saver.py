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
from halfstep.checkpoint.files import OWN_OF_RANKS
from halfstep.checkpoint.snapshot import Snapshot
from halfstep.checkpoint.tree import tree_to_json
from halfstep.events import log_warning

__all__ = ["Saver"]

_T = TypeVar("_T")


class Saver:
    """Saves into checkpoint directories; every rank must call the same methods in the same order.

    With `sharded`, each of several ranks writes the tensors that it stores; without, all have the same ones and rank 0 writes.
    """

    def __init__(self, ranks: Ranks | None = None, *, sharded: bool = True) -> None:
        self.ranks = ranks or Ranks()
        self._sharded = sharded
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
        contents = self._contents(weights=weights, state=state, own=own, meta=meta)
        self.ranks.on_main(lambda: check_target(path, overwrite=overwrite))
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

    def _contents(self, *, state: Any, own: Mapping[str, Any], **others: Any) -> Contents:
        """What this rank writes."""
        if self._sharded or not self.ranks.several:
            return self._on_all(lambda: checkpoint_contents(state=state, own=own, **others, ranks=self.ranks))
        self._on_all(lambda: tree_to_json(dict(own), "state"))  # raises for what cannot be stored, before it is sent
        owns = self.ranks.gather(dict(own))
        return self._on_all(
            lambda: (
                checkpoint_contents(state=state, own={**own, OWN_OF_RANKS: owns}, **others, ranks=Ranks())
                if self.ranks.is_main
                else Contents({}, {})
            )
        )

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
            self.ranks.on_main(then)
