"""Time and memory of a run on its device, read without disturbing it.

On a GPU a step is timed by events in the device's own queue: recording one costs a microsecond and waits for nothing, so
the host runs ahead as it does in a plain loop, and the times are read when the turn is over. On a CPU the clock is read
between steps.

Peak memory is the allocator's `max_memory_allocated` on a GPU. A CPU process has no such count, so it is the largest
resident set; that includes the interpreter and torch's libraries, which is why the resident set before the job was built
is kept beside it.
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

__all__ = ["StepClock", "largest_resident_bytes", "peak_bytes", "reset_peak", "resident_bytes", "synchronise"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def synchronise(device: torch.device) -> None:
    """Wait for the device; a CPU is always there."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class StepClock:
    """Times consecutive steps: `tick` at the start, then after each step; `seconds` gives the times."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queued = device.type == "cuda"
        self._marks: list[Any] = []

    def tick(self) -> None:
        """Mark this moment."""
        if self._queued:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            synchronise(self._device)
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The time between each two marks; begins anew."""
        marks, self._marks = self._marks, []
        pairs = list(itertools.pairwise(marks))
        if not self._queued:
            return [after - before for before, after in pairs]
        synchronise(self._device)
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def reset_peak(device: torch.device) -> None:
    """Forget the peak so far, where the system allows that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with contextlib.suppress(OSError):  # not Linux, or not permitted: the peak then covers the set-up too
            _CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """The peak since the last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return largest_resident_bytes()


def largest_resident_bytes() -> int:
    """The largest resident set of this process."""
    found = _status("VmHWM")
    if found is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """The resident set of this process now."""
    return _status("VmRSS") or largest_resident_bytes()


def _status(field: str) -> int | None:
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{field}:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
