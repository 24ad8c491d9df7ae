"""What a replay of a step needs, recorded while the step runs.

A skipped step changes nothing, so its micro-batches can be computed again, from the same weights, buffers and random
numbers. Recorded for each micro-batch: the state of the generators at the start of its forward, the factor of its loss,
whether the model was in training mode, the buffers at the start of the window or those that the loop has edited since the
micro-batch before (`edits.py`), and the user's function that computes the loss again. Nothing is recorded unless a
watch asks for it (`watch.replay`), and nothing waits for the device: the state of a CUDA generator is on the host.

On a GPU the outcome arrives during the next step, so the records of a step live until then.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.backends.base import Backend
from halfstep.engine.buffers import BufferGuard, SavedBuffers
from halfstep.engine.replay.dtype_errors import dtype_errors_named
from halfstep.engine.replay.edits import BufferEdits
from halfstep.engine.replay.numpy_state import NumpyState
from halfstep.engine.setup import PreparedRun
from halfstep.engine.window import Window
from halfstep.events import log_once
from halfstep.scaling.scaler import Scaler

__all__ = ["Generators", "MicroBatch", "Replays"]

_MOST_STEPS = 4  # whose outcome has not arrived; more are on their way only if nobody asks for them
_NUMPY = NumpyState()  # of the global generator: augmentations and jobs draw from it


@dataclass(frozen=True)
class Generators:
    """The state of every global generator that a forward on one device may draw from."""

    device: torch.device
    python: Any
    numpy: Any
    cpu: Tensor
    accelerator: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        """The state as it is; does not wait for the device."""
        of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, random.getstate(), _NUMPY.now(), torch.get_rng_state(), of_device)

    def restore(self) -> None:
        """Put every generator back into this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)


@dataclass(frozen=True)
class MicroBatch:
    """How to compute one micro-batch again."""

    generators: Generators
    factor: float | Tensor  # of its losses
    training: bool  # whether the model was in training mode
    compute_loss: Callable[[], Any] | None  # the user's; None if step() got none
    buffers: SavedBuffers = ()  # that are not what the micro-batch before left
    is_edited: bool = False  # whether a buffer was written to between two forwards of this micro-batch


class Replays:
    """The records of the steps whose outcome is not known yet, and what their replay needs from the Engine."""

    def __init__(
        self,
        run: PreparedRun,
        backend: Backend,
        buffers: BufferGuard,
        scaler: Scaler,
        watch: Any,
        released: bool,
        in_graphs: bool,
        model: Any = None,  # as the user passed it, one or several
    ) -> None:
        self.run, self.backend, self.buffers, self.scaler = run, backend, buffers, scaler
        self._active = False
        self.active = bool(getattr(watch, "replay", False))
        self._released, self._in_graphs = released, in_graphs
        members = model.values() if isinstance(model, Mapping) else model if isinstance(model, Sequence) else [model]
        self._was_compiled = any(hasattr(member, "_orig_mod") for member in members)  # by torch.compile(model)
        self.depth = 0  # above 0 inside a forward
        self.is_used = False  # whether the loop has passed a function to step(replay=...)
        self._start: MicroBatch | None = None  # the one in progress
        self._edits = BufferEdits(buffers)
        self._window: list[MicroBatch | None] = []
        self._steps: dict[int, list[MicroBatch | None]] = {}

    @property
    def active(self) -> bool:
        """Whether steps are recorded, and the backend knows which ranks overflow."""
        return self._active

    @active.setter
    def active(self, value: bool) -> None:
        self._active = value
        self.backend.watch_overflows(enabled=value)

    @property
    def is_one_of_several(self) -> bool:
        """Whether other ranks train the same model, and a replay must not wait for them."""
        return self.backend.context().world_size > 1

    @property
    def is_due_here(self) -> bool:
        """Whether a skipped step is examined on this rank: on those whose own gradients overflowed, or on rank 0 if none is known."""
        context = self.backend.context()
        if context.world_size == 1:
            return True
        overflowed = () if self.obstacle is not None else self.backend.overflowed_ranks
        return context.rank in (overflowed or (0,))

    @property
    def is_compiled(self) -> bool:
        """Whether code of the model is compiled: by the Engine, by module.compile() or by torch.compile(model)."""
        every = self.run.module.modules()
        return self._was_compiled or any(m._compiled_call_impl is not None for m in every)  # noqa: SLF001 - no public test

    @property
    def obstacle(self) -> str | None:
        """Why a step of this run cannot be computed again exactly; None if it can."""
        if self._released:
            return "gradient_release=True updated weights during the backward pass, so the step cannot be repeated"
        if self._in_graphs:
            return "the model runs as CUDA graphs, whose memory the next step has overwritten"
        return self.backend.replay_obstacle

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Around a training forward: record the generators; an error about dtypes names its module."""
        records = self.active and self.obstacle is None
        if records and self._start is None:
            buffers = self._edits.copies() if self._window else self.buffers.start
            now = Generators.now(self.run.device)
            self._start = MicroBatch(now, 1.0, self.run.module.training, None, buffers)
        elif records and self._start is not None and self._edits.changed_modules():
            self._start = replace(self._start, is_edited=True)
        self.depth += 1
        try:
            with dtype_errors_named(self.run.module):
                yield
        finally:
            self.depth -= 1
            if records:
                self._edits.leave()

    def end_micro_batch(self, compute_loss: Callable[[], Any] | None, window: Window) -> None:
        """Keep what the micro-batch that step() ends needs, if it ends one."""
        self.is_used |= compute_loss is not None
        if compute_loss is not None and not self.active:
            log_once("step(replay=...) has no effect: no watch with replay=True is attached to the Engine.")
        start, self._start = self._start, None
        if not self.active or len(self._window) >= window.num_micro_batches:
            return
        self._window.append(None if start is None else replace(start, factor=window.factor, compute_loss=compute_loss))

    def end_window(self, step: int) -> None:
        """File the window's micro-batches under the number of its step."""
        if self.active:
            self.file(step, self._window)
            self._window = []
            self._edits.forget()

    def file(self, step: int, batches: list[MicroBatch | None]) -> None:
        """Keep the micro-batches of a step until its outcome has arrived."""
        self._steps[step] = batches
        while len(self._steps) > _MOST_STEPS:
            del self._steps[next(iter(self._steps))]

    def drop_window(self) -> None:
        """Forget the micro-batches of the window in progress."""
        self._window, self._start = [], None
        self._edits.forget()

    def take(self, step: int) -> list[MicroBatch | None]:
        """The micro-batches of a step whose outcome has arrived; those of earlier steps are dropped."""
        records = self._steps.pop(step, [])
        for earlier in [number for number in self._steps if number < step]:
            del self._steps[earlier]
        return records
