"""Ledgers, and the lines through two of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import SettingError
from halfstep.planning.ledger import Event, Ledger, line_through
from halfstep.planning.replay import replay


def step(batch, slope=1000):
    """A step whose one activation grows with the batch."""
    persistent = (Event(-1, 4096, "weights"),)
    events = (
        Event(0, slope * batch, "activations", "layer", "forward"),
        Event(1, 300, "temporaries", "", "backward"),
        Event(1, None, "", "", "backward"),
        Event(0, None, "", "", "backward"),
    )
    return Ledger(persistent, (Event(-1, 8192, "states"),), events)


@given(st.integers(1, 50), st.integers(51, 100), st.integers(1, 1000))
def test_line_equals_the_ledger_of_a_trace(low, high, batch):
    """The line through two sizes of a linear step gives that step at any third size."""
    line = line_through(step(low), low, step(high), high)
    assert line.ledger(batch) == step(batch)
    assert line.requested(batch) == 4096 + 8192 + 1000 * batch + 300


def with_transform(size):
    """The step with a transform that a kernel allocates if it fits."""
    plain = step(4)
    extra = (Event(7, size, "transforms", "", "forward"), Event(7, None, "", "", "forward"))
    return Ledger(plain.persistent, plain.first_update, (*plain.events[:1], *extra, *plain.events[1:]))


@given(st.integers(1 << 20, 1 << 30))
def test_optional_memory_is_allocated_only_if_it_fits(size):
    """If it fits it is in the peak, otherwise the step is the same as without it, and a line never requires it."""
    plain, full = replay(step(4), 1 << 20), replay(with_transform(size), 1 << 20)
    assert full.breakdown["transforms"] == size
    assert full.allocated >= size + plain.allocated - 1024
    assert replay(with_transform(size), 1 << 20, usable_bytes=full.allocated) == full
    for usable in (0, plain.allocated, plain.allocated + size // 2):
        limited = replay(with_transform(size), 1 << 20, usable_bytes=usable)
        assert limited.allocated == plain.allocated
        assert limited.breakdown == plain.breakdown
    line = line_through(with_transform(size), 4, with_transform(2 * size), 8)
    assert line.requested(8) == 4096 + 8192 + 4000 + 300


def test_different_steps_make_no_line():
    """Ledgers with different events are not interpolated."""
    longer = Ledger(step(2).persistent, step(2).first_update, (*step(2).events, Event(9, 5, "activations")))
    assert line_through(step(1), 1, longer, 2) is None


def test_same_size_twice_is_rejected():
    """A line needs two sizes."""
    with pytest.raises(SettingError, match="Both ledgers have batch size 2"):
        line_through(step(2), 2, step(2), 2)


def test_replay_reports_the_second_step():
    """The peak includes the states that the first update allocated, and the categories add up to it."""
    peak = replay(step(4), 1 << 20)
    assert peak.breakdown["states"] == 8192
    assert sum(peak.breakdown.values()) == peak.allocated
    assert (peak.moment, peak.modules) == ("backward", {"layer": 4000})
