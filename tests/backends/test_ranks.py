"""Work that ranks do together; several ranks are in tests/checkpoint/test_contents.py."""

import time

import pytest
import torch.distributed as dist

from halfstep.backends.ranks import ProcessRanks, Ranks


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


def test_a_rank_that_waits_names_the_one_it_waits_for(monkeypatch, caplog):
    """Before the timeout: after half a minute in a message that the other rank does not send."""
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr("halfstep.backends.ranks._PATIENCE_SECONDS", 0.01)
    ranks, sent = ProcessRanks("the group"), dist.HashStore()
    vars(ranks)["_counts"] = sent
    with caplog.at_level("INFO", "halfstep"), ranks._message():
        deadline = time.monotonic() + 60
        while "has waited" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "Rank 0 of 2 has waited 0.01 s for rank 1." in caplog.text
    caplog.clear()
    sent.set("1", "2")
    with caplog.at_level("INFO", "halfstep"), ranks._message():
        time.sleep(0.1)
    assert not caplog.text
