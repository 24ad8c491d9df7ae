"""Times and sizes."""

import itertools
import subprocess
import sys

import pytest
import torch

from halfstep.comparison import clock
from halfstep.comparison.clock import StepClock, largest_resident_bytes, peak_bytes, resident_bytes

CPU = torch.device("cpu")


def test_a_clock_times_what_lies_between_its_ticks(monkeypatch):
    """Three ticks are two times, in order; after reading them the clock starts again."""
    times = iter([10.0, 10.5, 10.75])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(times))
    watch = StepClock(CPU)
    for _ in range(3):
        watch.tick()
    assert watch.seconds() == [0.5, 0.25]
    assert watch.seconds() == []


def test_a_clock_reads_the_systems_clock():
    """The times of real ticks add up to what the system's clock counts from the first tick to the last."""
    watch = StepClock(CPU)
    for _ in range(4):
        watch.tick()
    marks = list(watch._marks)
    assert watch.seconds() == [after - before for before, after in itertools.pairwise(marks)]
    assert marks == sorted(marks)


# In its own process: `malloc` there has no arenas of earlier tests to reuse, and an anonymous mapping is never reused.
PEAK = """
import mmap
import torch
from halfstep.comparison.clock import peak_bytes, reset_peak

cpu, size = torch.device("cpu"), 64 * 2**20
reset_peak(cpu)
before = peak_bytes(cpu)
with mmap.mmap(-1, size) as block:
    for page in range(0, size, mmap.PAGESIZE):
        block[page] = 1
assert peak_bytes(cpu) - before > 0.9 * size, (before, peak_bytes(cpu))
reset_peak(cpu)
assert peak_bytes(cpu) - before < 0.5 * size, (before, peak_bytes(cpu))
"""


def test_the_peak_includes_memory_that_was_freed():
    """A large block that was freed again is in the peak, and after a reset it is not."""
    if not clock._CLEAR.exists():
        pytest.skip("Requires: [/proc/self/clear_refs]")
    result = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_sizes_are_plausible():
    """A process that has loaded torch uses more than 50 MiB, and never more than its peak."""
    assert 50 * 2**20 < resident_bytes() <= largest_resident_bytes() * 1.01


def test_without_proc_the_systems_own_count_is_used(monkeypatch, tmp_path):
    """Other systems have no /proc; getrusage counts there."""
    monkeypatch.setattr(clock, "_STATUS", tmp_path / "none")
    assert resident_bytes() > 50 * 2**20


@pytest.mark.gpu
def test_a_gpu_is_timed_in_its_own_queue():
    """The time of a product is that of the device, not of the call."""
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)
    watch = StepClock(device)
    watch.tick()
    for _ in range(20):
        a = a @ a / 4096
    watch.tick()
    assert watch.seconds()[0] > 1e-4
    assert peak_bytes(device) >= a.numel() * 4
