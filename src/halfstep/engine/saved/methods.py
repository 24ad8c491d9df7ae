"""The state methods of the Engine: masters, state dictionaries and checkpoint directories."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from halfstep.backends import Backend
from halfstep.checkpoint.directory import Checkpoint, open_checkpoint
from halfstep.checkpoint.saver import Saver
from halfstep.engine.delivery import Delivery, Progress
from halfstep.engine.ema import Ema
from halfstep.engine.saved.checkpoint import checkpoint_parts, engine_state, nonfinite_weights, restore_extra, with_own
from halfstep.engine.saved.state import RunParts, load_state, state_of
from halfstep.engine.setup import PreparedRun
from halfstep.engine.truth import Truth
from halfstep.engine.window import Window
from halfstep.scaling.scaler import Scaler

__all__ = ["SavedEngine"]


class SavedEngine(ABC):
    """What an Engine saves and restores; the attributes are set by its constructor."""

    scaler: Scaler
    ema: Ema | None
    window: Window
    progress: Progress
    backend: Backend
    schedulers: list[Any]
    _run: PreparedRun
    _delivery: Delivery

    @abstractmethod
    def truth(self) -> Truth:
        """The truth table."""

    @abstractmethod
    def reset_window(self) -> None:
        """Drop the gradients of the current window."""

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters that the optimizers own, by name."""
        return self._run.params

    def masters(self) -> dict[str, Tensor]:
        """The fp32 value of every trainable parameter, by name."""
        return self._parts().masters()

    def _parts(self) -> RunParts:
        return RunParts(self._run, self.schedulers, self.scaler, self.ema, self.window, self.progress, self.backend)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs apart from the random-number state; only between windows."""
        self._delivery.drain()
        return state_of(self._parts(), self.truth().as_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; what does not fit is rejected before anything is changed."""
        load_state(self._parts(), state)
        self._delivery.discard()  # outcomes of the run that this state replaces
        self.reset_window()

    @cached_property
    def saver(self) -> Saver:
        """What writes this engine's checkpoints; `close` waits for it."""
        saver = Saver(self.backend.ranks(), sharded=self.backend.shards)
        self._run.undo.callback(saver.finish)
        return saver

    def save(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        allow_nonfinite: bool = False,
        wait: bool = True,
        **extra: Any,
    ) -> Path:
        """Write a checkpoint directory: weights under the model's own names, state, random-number state.

        With `wait=False`, return as soon as the state is copied and write in the background; see `finish_save`. Every rank
        calls it: where the backend shards tensors each writes its own part, else rank 0 writes for all. Each rank's
        random-number state and `extra` are part of it.
        """
        state = self.state_to_save()
        bad = {} if allow_nonfinite else nonfinite_weights(state, self.saver.ranks)
        parts = checkpoint_parts(state, extra, bad)
        if not self.saver.ranks.several and self.backend.context().rank > 0:
            return Path(path)  # the backend does not connect its ranks: rank 0 has the same state and writes it alone
        return self.saver.save(path, **parts, overwrite=overwrite, wait=wait)

    def state_to_save(self) -> dict[str, Any]:
        """`state_dict()` after the save before is finished; a rank that has none is an error on every rank."""
        self.finish_save()
        state: dict[str, Any] = {}
        self.saver.ranks.together(lambda: state.update(self.state_dict()))
        return with_own(state, self._run.optimizers, self.saver.ranks)

    def finish_save(self) -> None:
        """Wait until the checkpoint of `save(wait=False)` is on disk; raises an error if it could not be written.

        The next `save` and `close` do the same.
        """
        self.saver.finish()

    def load(self, path: str | Path | Checkpoint) -> dict[str, Any]:
        """Continue from a checkpoint directory; returns what `save` was given as extra.

        Any number of ranks may have saved it. Every rank calls it; where the backend shards tensors, each reads its own part.
        """
        self.finish_save()
        ranks = self.saver.ranks
        opened = contextlib.nullcontext(path) if isinstance(path, Checkpoint) else open_checkpoint(path, ranks)
        with opened as checkpoint:
            ranks.together(lambda: self.load_state_dict(engine_state(checkpoint)))
            return restore_extra(checkpoint, ranks)
