"""Ranks that die or hang: who is blamed, and what counts as a failed message."""

import time

import pytest

from halfstep.backends.context import RunContext
from halfstep.errors import RankError, SettingError
from halfstep.train.heartbeat import RankState, describe_ranks_behind, is_communication_error, watch_ranks


def states(*ticks, beat=0):
    return {rank: RankState(beat, tick, f"step {tick}", 12.0) for rank, tick in enumerate(ticks)}


def test_a_rank_whose_count_stands_still_is_dead():
    """Even if it was not behind when it died."""
    before, after = states(5, 5, 5), states(5, 5, 5, beat=3)
    after[1] = before[1]
    assert describe_ranks_behind(before, after, 3, 0) == "No sign of life of rank 1, last seen in step 5."


def test_a_rank_that_never_posted_is_dead():
    """Such as one that failed before its first second."""
    assert "rank 1" in describe_ranks_behind({0: states(1)[0]}, {0: states(1, beat=2)[0]}, 2, 0)


def test_a_living_rank_behind_the_others_is_the_one_they_wait_for():
    """With what it does and for how long."""
    text = describe_ranks_behind(states(7, 5, 7), states(7, 5, 7, beat=3), 3, 0)
    assert text == "The others wait for rank 1, in step 5 for 12 s."


def test_ranks_in_step_blame_nobody():
    """A broken network, for example."""
    assert "same number" in describe_ranks_behind(states(5, 5), states(5, 5, beat=3), 2, 0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Timed out waiting 8000ms for recv operation to complete"), True),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1234"), True),
        (RuntimeError("ProcessGroupGloo::allgather: invalid tensor size at index 0"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (SettingError("Connection"), False),
    ],
)
def test_failed_messages_are_told_from_other_errors(error, expected):
    """By torch's own texts."""
    assert is_communication_error(error) is expected


def test_one_process_passes_its_errors_unchanged():
    """There are no others to blame, and no thread."""
    error = RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError) as caught, watch_ranks(RunContext(), 1) as heartbeat:
        heartbeat.tick("step 1")
        raise error
    assert caught.value is error
    assert not isinstance(caught.value, RankError)


def test_ticks_restart_the_clock():
    """`doing` is the last one."""
    with watch_ranks(RunContext(), 1) as heartbeat:
        heartbeat.tick("step 1")
        time.sleep(0.01)
        heartbeat.tick("step 2")
        assert heartbeat.doing == "step 2"
