"""An autopsy for each skipped step of a run, within limits.

A run that skips once gets an autopsy; one that skips for ever must not spend its time on them. So the first three skipped
steps are examined, then the 4th, 8th, 16th and so on.

On several ranks those examine a step whose own gradients overflowed; the others wait for them in their next message. Rank 0
receives the autopsies of all (`mail.py`).

The kernels of a replay take two seconds to compile, longer than the replay itself. A thread does that while training starts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from halfstep.engine.result import StepResult
from halfstep.events import log_info, log_warning
from halfstep.kernels.available import triton_runs_on
from halfstep.watching.autopsy import Autopsy
from halfstep.watching.mail import AutopsyMail
from halfstep.watching.replay import examine

__all__ = ["Autopsies", "is_due"]

_FIRST = 3
_MOST = 32  # autopsies that are kept


def is_due(skips: int) -> bool:
    """Whether the skip with this number, from 1, is examined."""
    return skips <= _FIRST or skips & (skips - 1) == 0


class Autopsies:
    """A watch of the Engine that examines skipped steps; each autopsy is logged and passed to `outlet`."""

    replay = True  # the Engine records what a replay needs

    def __init__(self, outlet: Callable[[Autopsy], None] | None = None) -> None:
        self._outlet = outlet
        self._engine: Any = None
        self._compiling: threading.Thread | None = None
        self.num_skips = 0
        self.autopsies: list[Autopsy] = []  # the latest ones

    @property
    def is_expecting(self) -> bool:
        """Whether other ranks are examining a step."""
        return self._mail.is_expecting

    def attach(self, engine: Any) -> None:
        """Called by the Engine."""
        self._engine = engine
        self._mail = AutopsyMail(engine.backend.context())
        if engine.device.type == "cuda" and engine.replays.obstacle is None and triton_runs_on(engine.device):
            self._compiling = threading.Thread(target=_compile, args=(engine.device,), name="halfstep-autopsy")
            self._compiling.start()

    def delivered(self, result: StepResult) -> None:
        """Called by the Engine when the outcome of a step has arrived."""
        engine = self._engine
        self._collect()
        self.num_skips += result.skipped
        if not result.skipped or not is_due(self.num_skips):
            engine.replays.take(result.step)
            return
        if engine.replays.obstacle is None:
            self._mail.expect(result.step, engine.backend.overflowed_ranks)
        if not engine.replays.is_due_here:
            engine.replays.take(result.step)
            return
        if self._compiling is not None:
            self._compiling.join()
        autopsy = examine(engine.replays, result.step, result.scale or 1.0, engine.hardware)
        self._mail.post(autopsy)
        self._report(autopsy)

    def close(self) -> None:
        """Called by the Engine: what other ranks have found about the last steps."""
        self._collect(wait=True)

    def _collect(self, *, wait: bool = False) -> None:
        for autopsy in self._mail.collect(wait=wait):
            self._report(autopsy)

    def _report(self, autopsy: Autopsy) -> None:
        self.autopsies = [*self.autopsies[1 - _MOST :], autopsy]
        # A scale that is too large for one step is what a dynamic loss scale is for; the rest needs somebody's attention.
        (log_info if autopsy.cause == "backward" and autopsy.at_scale_1 else log_warning)(str(autopsy))
        if self._outlet is not None:
            self._outlet(autopsy)


def _compile(device: torch.device) -> None:
    from halfstep.kernels.ranges.ranges_triton import compile_kernels

    with contextlib.suppress(Exception), torch.cuda.device(device):  # what fails here fails again in the replay
        compile_kernels()
