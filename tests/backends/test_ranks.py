"""Work that ranks do together; several ranks are in tests/checkpoint/test_contents.py."""

import pytest

from halfstep.backends.ranks import Ranks


def test_one_process_does_alone_what_ranks_do_together():
    """It returns its own value, and raises its own error."""
    ranks = Ranks()
    assert (ranks.rank, ranks.num_ranks) == (0, 1)
    assert ranks.gather(3) == [3]
    assert ranks.together(lambda: {"a": 1}) == [{"a": 1}]
    assert ranks.on_main(lambda: 5) == 5
    assert (ranks.broadcast(2), ranks.sums(1.0, 2.0), ranks.largest(4.0), ranks.start_largest(6)()) == (
        2,
        [1.0, 2.0],
        4.0,
        6,
    )
    with pytest.raises(KeyboardInterrupt):
        ranks.together(lambda: (_ for _ in ()).throw(KeyboardInterrupt))


def test_a_failure_of_another_rank_is_raised_with_its_number_and_text(monkeypatch):
    """Here a message of rank 1 is made up."""
    from halfstep.errors import HalfstepError

    monkeypatch.setattr(Ranks, "gather", lambda _, value: [value, (None, "OSError: disk full", False)])
    with pytest.raises(HalfstepError, match="rank 1: OSError: disk full"):
        Ranks().together(lambda: 1)
