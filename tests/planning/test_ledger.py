"""Ledgers and the lines between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import SettingError
from halfstep.planning.ledger import Entry, Ledger, line_through
from halfstep.planning.replay import replay


def step(batch, slope=1000):
    """A step whose one activation grows with the batch."""
    held = (Entry(-1, 4096, "weights"),)
    lines = (
        Entry(0, slope * batch, "activations", "layer", "forward"),
        Entry(1, 300, "temporaries", "", "backward"),
        Entry(1, None, "", "", "backward"),
        Entry(0, None, "", "", "backward"),
    )
    return Ledger(held, (Entry(-1, 8192, "states"),), lines)


@given(st.integers(1, 50), st.integers(51, 100), st.integers(1, 1000))
def test_line_gives_the_ledger_that_a_trace_would(low, high, asked):
    """Through two sizes of a linear step, the line at any third size is that step."""
    line = line_through(step(low), low, step(high), high)
    assert line.ledger(asked) == step(asked)
    assert line.requested(asked) == 4096 + 8192 + 1000 * asked + 300


def with_transform(size):
    """The step with a transform that a kernel takes where there is room."""
    plain = step(4)
    extra = (Entry(7, size, "transforms", "", "forward"), Entry(7, None, "", "", "forward"))
    return Ledger(plain.held, plain.made, (*plain.lines[:1], *extra, *plain.lines[1:]))


@given(st.integers(1 << 20, 1 << 30))
def test_what_is_optional_is_taken_where_there_is_room(size):
    """With room it is in the peak, without it the step is as if it had none, and a line never asks for it."""
    plain, full = replay(step(4), 1 << 20), replay(with_transform(size), 1 << 20)
    assert full.breakdown["transforms"] == size
    assert full.allocated >= size + plain.allocated - 1024
    assert replay(with_transform(size), 1 << 20, room=full.allocated) == full
    for room in (0, plain.allocated, plain.allocated + size // 2):
        found = replay(with_transform(size), 1 << 20, room=room)
        assert found.allocated == plain.allocated
        assert found.breakdown == plain.breakdown
    line = line_through(with_transform(size), 4, with_transform(2 * size), 8)
    assert line.requested(8) == 4096 + 8192 + 4000 + 300


def test_different_steps_make_no_line():
    """Ledgers with other lines are not interpolated."""
    longer = Ledger(step(2).held, step(2).made, (*step(2).lines, Entry(9, 5, "activations")))
    assert line_through(step(1), 1, longer, 2) is None


def test_same_size_twice_is_refused():
    """A line needs two sizes."""
    with pytest.raises(SettingError, match="same batch"):
        line_through(step(2), 2, step(2), 2)


def test_replay_reports_the_second_step():
    """The peak has the states that the first step's update made, and the causes add up to it."""
    peak = replay(step(4), 1 << 20)
    assert peak.breakdown["states"] == 8192
    assert sum(peak.breakdown.values()) == peak.allocated
    assert (peak.moment, peak.modules) == ("backward", {"layer": 4000})
