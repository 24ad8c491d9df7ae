"""SIGINT and SIGTERM request a stop; the run finishes its step, saves and exits."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from halfstep.events import log_warning

__all__ = ["StopRequest"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A `with` block in which the signals only set `signal`, until a further one has its usual effect.

    That is the second one, or with `saves`, the third: people press Ctrl-C twice, and the second must not cost them the
    checkpoint that the first one asked for.
    """

    def __init__(self, *, saves: bool = False) -> None:
        self.signal: signal.Signals | None = None
        self._warnings_left = 1 if saves else 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # the only thread that may set handlers
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.signal is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:  # the second one, as the third is not received here
            self._warnings_left -= 1
            with contextlib.suppress(RuntimeError):  # the signal may have interrupted a write to the same stream
                log_warning(
                    "Stopping: a checkpoint is saved as soon as the current step ends. Once more exits without it."
                )
        self.signal = self.signal or signal.Signals(number)
        if self._warnings_left <= 0:
            for each, handler in self._before.items():
                signal.signal(each, handler)  # the next signal ends the process at once
