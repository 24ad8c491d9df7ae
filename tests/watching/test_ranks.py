"""Watches, autopsies and Guards on two gloo ranks, all started once."""

from pathlib import Path

import pytest

from rank_processes import cases_of_ranks

PROGRAM = Path(__file__).parents[1] / "watch_ranks_program.py"


@pytest.fixture(scope="module")
def ranks():
    """What each rank reports, by case."""
    return [{case["case"]: case for case in cases} for cases in cases_of_ranks(PROGRAM)]


def test_the_rank_that_overflowed_names_the_module(ranks):
    """Each step is examined where it overflowed; rank 0 has the autopsies of all."""
    first, second = (rank["one_rank_overflows"] for rank in ranks)
    assert [(a["step"], a["rank"], a["module"], a["cause"]) for a in first["autopsies"]] == [
        (3, 1, "middle", "forward"),
        (4, 0, "middle", "forward"),
    ]
    assert [(a["step"], a["rank"], a["module"]) for a in second["autopsies"]] == [(3, 1, "middle")]
    assert first["reported"] == [1, 0]
    assert "(forward, rank 1)" in second["autopsies"][0]["text"]


def test_skips_name_the_ranks_that_overflowed(ranks):
    """The event is the same on both ranks, apart from who reports it."""
    for number, rank in enumerate(ranks):
        skips = rank["one_rank_overflows"]["skips"]
        assert [skip["data"]["ranks"] for skip in skips] == [[1], [0]]
        assert {skip["rank"] for skip in skips} == {number}
        assert "on rank 1." in skips[0]["message"]


def test_a_replay_disturbs_no_rank(ranks):
    """Weights, buffers and random numbers are those of a run without replays, bit for bit, and ranks stay equal."""
    assert all(rank["one_rank_overflows"]["undisturbed"] and rank["one_rank_overflows"]["same"] for rank in ranks)


def test_the_autopsy_of_the_last_step_arrives(ranks):
    """Closing waits for it."""
    for rank in ranks:
        assert [(a["step"], a["rank"]) for a in rank["last_step_overflows"]["autopsies"]] == [(2, 1)]


def test_a_model_that_sends_messages_is_not_replayed(ranks):
    """The operation is named, and no rank waits for an answer."""
    for rank in ranks:
        (autopsy,) = rank["messages_in_the_model"]["autopsies"]
        assert (autopsy["rank"], autopsy["cause"]) == (1, "not replayed")
        assert "sends messages to other ranks (c10d.allreduce_" in autopsy["text"]


def test_a_wrapped_model_is_not_replayed(ranks):
    """Rank 0 reports the reason and the way out."""
    (autopsy,) = ranks[0]["wrapped_model"]["autopsies"]
    assert "DistributedDataParallel" in autopsy["text"]
    assert 'backend="ddp"' in autopsy["text"]
    assert not ranks[1]["wrapped_model"]["autopsies"]


def test_a_sharded_model_names_the_rank_that_overflowed(ranks):
    """The rank that computed the inf, not those whose shards have it after the reduction."""
    texts = [a["text"] for a in ranks[0]["sharded_model"]["autopsies"]]
    assert ["overflowed on rank 1 of 2" in text for text in texts] == [True, False]
    assert ["overflowed on rank 0 of 2" in text for text in texts] == [False, True]
    assert all("the model is sharded over 2 ranks" in text for text in texts)
    parameters = [skip["data"]["parameters"] for skip in ranks[0]["sharded_model"]["skips"]]
    assert parameters == [skip["data"]["parameters"] for skip in ranks[1]["sharded_model"]["skips"]]
    assert parameters[0]["middle.linear.weight"] == 25


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
def test_statistics_of_shards_are_those_of_the_whole(ranks, precision):
    """Counts, extremes and updates equal those of ddp, and are the same on every rank."""
    for rank in ranks:
        report = rank["sharded_statistics"][precision]
        assert report["numels"]
        assert report["moving"]
        assert report["same"]
        assert report["error"] < 1e-4
        assert report["ratios"] < 1e-4


def test_watches_of_sharded_models_must_agree(ranks):
    """They exchange messages, so a watch on one rank is an error on every rank; with ddp it is fine."""
    for rank in ranks:
        assert list(rank["watches_that_differ"]["errors"]) == ["fsdp"]
        assert "NoneType on rank 1" in rank["watches_that_differ"]["errors"]["fsdp"]


def test_guards_decide_the_same_on_every_rank(ranks):
    """In a loop with DistributedDataParallel and with FSDP2; without the group, shards are rejected by name."""
    for rank in ranks:
        guards = rank["guards"]
        assert [guards[name] for name in ("ddp", "ddp_fused", "fsdp")] == [[1, True]] * 3
        assert "Pass process_group=" in guards["error"]


def test_an_attached_watch_has_the_rank(ranks):
    """Gradients after DistributedDataParallel are the same on both ranks; those of sharded parameters are counted as a whole."""
    for number, rank in enumerate(ranks):
        assert [(skip["step"], skip["rank"]) for skip in rank["attached"]["skips"]] == [(2, number)]
        assert rank["attached"]["same"]
        assert rank["attached"]["whole"]
