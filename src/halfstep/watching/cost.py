"""What watching costs: the time of the samples, and the time of the steps that it is compared with.

Both are measured where the work happens, by events on a GPU and by the clock on a CPU, and neither waits for the device. The
time of the steps runs from the end of the first step to the end of the latest one known to have ended, with validation and whatever
else the loop does in between. The first step and its
sample are left out, because both compile kernels and allocate memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfstep.hardware.units import count_text

__all__ = ["DeviceClock", "StepClock", "WatchCost", "cost_of"]


@dataclass(frozen=True)
class WatchCost:
    """What the samples cost so far. Times are None until two steps have ended."""

    samples: int
    seconds_per_sample: float  # without the first, if there are more
    seconds_per_step: float | None = None  # samples included
    share: float | None = None  # of the samples in the time of all steps but the first

    def __str__(self) -> str:
        text = f"{count_text(self.samples, 'sample')} of {1000 * self.seconds_per_sample:.2f} ms"
        if self.share is None or self.seconds_per_step is None:
            return f"{text}; their share is known after two steps"
        percent = f"{100 * self.share:.2g}" if self.share < 0.995 else "100"
        milliseconds = f"{1000 * self.seconds_per_step:.2f} ms per step"
        return f"{text}, {percent} % of the time: {milliseconds} with all that ran between the steps"


class DeviceClock:
    """Time between its creation and `stop`, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._is_cuda = device.type == "cuda"
        self._started = time.perf_counter()
        self._record()

    def stop(self) -> None:
        """End the interval."""
        self._elapsed = time.perf_counter() - self._started
        self._record()

    def seconds(self) -> float:
        """The length of the interval; on a GPU, once both ends have passed."""
        if not self._is_cuda:
            return self._elapsed
        first, last = self._events
        return float(first.elapsed_time(last)) / 1000

    def _record(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)


_ALL_TIMED = 64  # marks of a GPU; of later ones every eighth, because an event costs host time
_LATER_TIMED = 8


class StepClock:
    """The time from the first `mark` to the latest one that the device has passed, and was timed."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._num_marks = 0
        self._first: float | torch.cuda.Event | None = None
        self._passed: tuple[float | torch.cuda.Event, int] | None = None  # with the number of the mark
        self._pending: tuple[torch.cuda.Event, int] | None = None

    def mark(self) -> None:
        """A step has ended, or its work was launched."""
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._num_marks += 1
        if self._is_cuda and self._num_marks > _ALL_TIMED and self._num_marks % _LATER_TIMED:
            return
        self._update()
        if self._pending is not None:  # one event on its way is enough
            return
        moment = self._moment()
        if self._first is None:
            self._first = moment
        elif isinstance(moment, float):
            self._passed = moment, self._num_marks
        else:
            self._pending = moment, self._num_marks

    def elapsed(self) -> tuple[float, int] | None:
        """Seconds and the number of steps in them; None before two steps have ended."""
        self._update()
        if self._passed is None:
            return None
        last, number = self._passed
        if isinstance(last, float):
            assert isinstance(self._first, float)
            return last - self._first, number - 1
        assert isinstance(self._first, torch.cuda.Event)
        return float(self._first.elapsed_time(last)) / 1000, number - 1

    def _moment(self) -> float | torch.cuda.Event:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _update(self) -> None:
        """An event that the device has passed is the latest one; the first one was recorded before it."""
        if self._pending is not None and self._pending[0].query():  # type: ignore[no-untyped-call]
            self._passed, self._pending = self._pending, None


def cost_of(sample_seconds: Sequence[Sequence[float]], clocks: Sequence[StepClock]) -> WatchCost:
    """The cost of several streams of samples, whose steps take turns."""
    every = [s for seconds in sample_seconds for s in seconds]
    later = [s for seconds in sample_seconds for s in seconds[1:]]
    counted = later or every
    mean = sum(counted) / len(counted) if counted else 0.0
    total, steps = max((clock.elapsed() or (0.0, 0) for clock in clocks), default=(0.0, 0))
    if not total:
        return WatchCost(len(every), mean)
    return WatchCost(len(every), mean, total / steps, min(sum(later) / total, 1.0))
