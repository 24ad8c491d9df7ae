"""Times and sizes."""

import time

import pytest
import torch

from halfstep.comparison import clock
from halfstep.comparison.clock import StepClock, largest_resident_bytes, peak_bytes, reset_peak, resident_bytes

CPU = torch.device("cpu")


def test_a_clock_times_what_lies_between_its_ticks():
    """Three ticks are two times, in order; then it begins anew."""
    watch = StepClock(CPU)
    watch.tick()
    time.sleep(0.02)
    watch.tick()
    watch.tick()
    first, second = watch.seconds()
    assert first >= 0.02
    assert second < first
    assert watch.seconds() == []


def test_the_peak_sees_what_was_held_and_let_go():
    """A large tensor that is gone again is in the peak, and after a reset it is not."""
    if not clock._CLEAR.exists():
        pytest.skip("Requires: [/proc/self/clear_refs]")
    size = 64 * 2**20
    reset_peak(CPU)
    before = peak_bytes(CPU)
    held = torch.ones(size // 4)
    del held
    assert peak_bytes(CPU) - before > 0.9 * size
    reset_peak(CPU)
    assert peak_bytes(CPU) - before < 0.5 * size


def test_sizes_are_plausible():
    """A process with torch in it holds more than 50 MiB and less at any moment than at its peak."""
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
