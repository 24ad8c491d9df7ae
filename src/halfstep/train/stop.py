"""SIGINT and SIGTERM request a stop; the run finishes its step, on several ranks the same one, saves and exits."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from halfstep.backends.ranks import Ranks
from halfstep.events import log_warning

__all__ = ["AgreedStop", "StopRequest"]

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


class AgreedStop:
    """A request to stop that all ranks have agreed on; false until then.

    It is asked for after every step, without waiting: the answer to the question of one step is read after the next, on all
    ranks alike. So a signal that reached one rank, or all of them at different moments, ends all ranks after the same step.
    """

    def __init__(self, request: StopRequest, ranks: Ranks) -> None:
        self._request, self._ranks = request, ranks
        self._agreed: signal.Signals | None = None
        self._answer: Callable[[], int] | None = None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal; of one process as soon as it has arrived."""
        return self._agreed if self._ranks.several else self._request.signal

    @property
    def requested(self) -> bool:
        """Whether this process received a signal, agreed or not."""
        return bool(self._request)

    def __bool__(self) -> bool:
        return self.signal is not None

    def poll(self) -> None:
        """Read the answer to the last question and ask again; all ranks call it after the same step."""
        if self._ranks.several and self._agreed is None:
            if self._answer is not None:
                self._set(self._answer())
            self._answer = None if self._agreed else self._ranks.start_largest(self._number())

    def settle(self) -> None:
        """Agree now, waiting for the other ranks."""
        if self._ranks.several and self._agreed is None:
            before, self._answer = self._answer, None
            self._set(max(before() if before is not None else 0, int(self._ranks.largest(self._number()))))

    def _number(self) -> int:
        return 0 if self._request.signal is None else int(self._request.signal)

    def _set(self, number: int) -> None:
        self._agreed = signal.Signals(number) if number else None
