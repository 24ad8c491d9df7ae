"""The state methods of the Engine: masters, state dictionaries and checkpoint directories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch import Tensor

from halfstep.backends import Backend
from halfstep.checkpoint.directory import Checkpoint, load_checkpoint, save_checkpoint
from halfstep.engine.delivery import Delivery, Progress
from halfstep.engine.ema import Ema
from halfstep.engine.saved.checkpoint import checkpoint_parts, engine_state, restore_extra
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

    def save(self, path: str | Path, *, overwrite: bool = False, allow_nonfinite: bool = False, **extra: Any) -> Path:
        """Write a checkpoint directory: weights under the model's own names, state, random-number state."""
        weights, state, meta = checkpoint_parts(self.state_dict(), extra, allow_nonfinite=allow_nonfinite)
        return self.backend.write(
            path, lambda: save_checkpoint(path, weights=weights, state=state, meta=meta, overwrite=overwrite)
        )

    def load(self, path: str | Path | Checkpoint) -> dict[str, Any]:
        """Continue from a checkpoint directory; returns what `save` was given as extra."""
        checkpoint = path if isinstance(path, Checkpoint) else load_checkpoint(path)
        self.load_state_dict(engine_state(checkpoint))
        return restore_extra(checkpoint)
