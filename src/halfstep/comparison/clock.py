"""Time and memory of a run on its device, measured without disturbing it.

On a GPU a step is timed by CUDA events: recording one costs a microsecond and does not synchronize, so the host runs
ahead as in a plain loop, and the times are read when the turn is over. On a CPU the clock is read between steps.

Peak memory is the allocator's `max_memory_allocated` on a GPU. A CPU process has no such counter, so it is the maximum
resident set size; that includes the interpreter and torch's libraries, which is why the resident set before the job was
built is stored with it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

__all__ = ["StepClock", "largest_resident_bytes", "peak_bytes", "reset_peak", "resident_bytes", "synchronize"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def synchronize(device: torch.device) -> None:
    """Wait for the device; a no-op on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class StepClock:
    """Times consecutive steps: call `tick` at the start and after each step, then `seconds`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queued = device.type == "cuda"
        self._marks: list[Any] = []

    def tick(self) -> None:
        """Record a time mark."""
        if self._queued:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            synchronize(self._device)
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The time between consecutive marks; clears them."""
        marks, self._marks = self._marks, []
        pairs = list(itertools.pairwise(marks))
        if not self._queued:
            return [after - before for before, after in pairs]
        synchronize(self._device)
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def reset_peak(device: torch.device) -> None:
    """Reset the peak, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with contextlib.suppress(OSError):  # not Linux, or not permitted: the peak then includes the setup
            _CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """The peak since the last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return largest_resident_bytes()


def largest_resident_bytes() -> int:
    """The maximum resident set size of this process."""
    high_water_mark = _status("VmHWM")
    if high_water_mark is not None:
        return high_water_mark
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """The current resident set size of this process."""
    return _status("VmRSS") or largest_resident_bytes()


def _status(field: str) -> int | None:
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = re.search(rf"^{field}:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None
