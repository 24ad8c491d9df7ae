"""Data on two gloo ranks: divided, uneven, resumed, moved between numbers of ranks, and rejected if every rank has all of it."""

import importlib.util
from pathlib import Path

import pytest

from rank_processes import cases_of_ranks

pytest.importorskip("torchdata", reason="Requires: [torchdata]")

SHARDS = all(importlib.util.find_spec(name) for name in ("PIL", "webdataset"))
PROGRAM = Path(__file__).parents[1] / "data_program.py"


@pytest.fixture(scope="module")
def ranks():
    """The cases of both ranks, from one launch."""
    parts = ["shards"] if SHARDS else []
    return cases_of_ranks(PROGRAM, "sharing", *parts, "resuming", "moving", "rejecting", "training")


def select(ranks, **values):
    """The one matching case of each rank."""
    chosen = [[case for case in cases if values.items() <= case.items()] for cases in ranks]
    assert [len(each) for each in chosen] == [1, 1]
    return [each[0] for each in chosen]


@pytest.mark.parametrize("name", ["sampler", "stateful", "workers"])
def test_a_distributed_sampler_gets_its_epoch(ranks, name):
    """Every epoch has each example once over both ranks, in another order, the same in every kind of loader."""
    cases = select(ranks, case="epochs", name=name)
    first, second = ([case["epochs"][epoch] for case in cases] for epoch in (0, 1))
    assert first != second
    for both in (first, second):
        assert sorted(number for rank in both for batch, _, _ in rank for number in batch) == list(range(22))
    assert [case["epochs"] for case in cases] == [
        case["epochs"] for case in select(ranks, case="epochs", name="sampler")
    ]


def test_uneven_batches_are_weighted_and_both_ranks_take_the_same_steps(ranks):
    """A last batch of 2 and 1 examples, and one of 1 and none: weights are proportional, and their mean is 1."""
    uneven = [case["epochs"][0] for case in select(ranks, case="epochs", name="uneven")]
    assert [rank[-1] for rank in uneven] == [[[12, 14], 2, pytest.approx(4 / 3)], [[13], 1, pytest.approx(2 / 3)]]
    none = [case["epochs"][0] for case in select(ranks, case="epochs", name="one rank has none")]
    assert [rank[-1] for rank in none] == [[[6], 1, 2.0], [[1, 3, 5], 0, 0.0]]
    assert {len(rank) for rank in uneven} == {3}
    tail = [case["epochs"][0] for case in select(ranks, case="epochs", name="tail")]
    assert [[(size, weight) for _, size, weight in rank] for rank in tail] == [
        [(718, None), (1, 2.0)],
        [(718, None), (0, 0.0)],
    ]


@pytest.mark.skipif(not SHARDS, reason="Requires: [pillow, webdataset]")
def test_ranks_with_fewer_images_in_their_shards_stay_in_step(ranks):
    """Each epoch has every image at most once, in complete batches, and continues exactly after a resume."""
    cases = select(ranks, case="epochs", name="shards")
    for epoch in (0, 1):
        both = [case["epochs"][epoch] for case in cases]
        assert len(both[0]) == len(both[1])
        real = [image for rank in both for batch, size, _ in rank if size for image in batch]
        assert len(set(real)) == len(real) >= 11
        for step in zip(*both, strict=True):
            weights = [1.0 if weight is None else weight for _, _, weight in step]
            assert weights == [1.0, 1.0] or sorted(weights) == [0.0, 2.0]
    assert all(case["same"] for case in cases)


@pytest.mark.parametrize("name", ["sampler", "stateful", "workers", "uneven"])
def test_a_resumed_rank_continues_with_its_batches_and_weights(ranks, name):
    """Plain DataLoaders by skipping, torchdata's StatefulDataLoader by its own state."""
    for case in select(ranks, case="resume", name=name):
        assert case["same"]
        assert case["rest"]


@pytest.mark.parametrize("name", ["sampler", "stateful", "tail"])
def test_a_position_moves_to_another_number_of_ranks(ranks, name):
    """What one process had left of the epoch, the two ranks have together; nothing twice."""
    for case in select(ranks, case="move", name=name):
        assert case["parts"] == case["rest"]


def test_a_position_that_cannot_be_moved_raises(ranks):
    """Five examples cannot be skipped by two ranks, and the position of one rank is not that of another."""
    for case in select(ranks, case="move", name="uneven"):
        assert "each would have to skip 2.5 examples" in case["error"]
    for rank, case in enumerate(select(ranks, case="move", name="other rank")):
        assert f"position of rank {1 - rank}, and this process is rank {rank}" in case["error"]


def test_data_that_ignores_ranks_is_rejected_on_every_rank(ranks):
    """Equal first batches, a shuffled DataLoader over the whole dataset, and a sampler of another rank; data that names `rank` gets a warning."""
    for case in select(ranks, case="reject", name="same list"):
        assert "gave ranks 0 and 1 the same first batch" in case["result"]
        assert "DistributedSampler(dataset, world_size, rank, seed=seed)" in case["result"]
    for case in select(ranks, case="reject", name="whole dataset"):
        assert "gives every one of the 2 ranks a DataLoader over all 22 samples" in case["result"]
    for rank, case in enumerate(select(ranks, case="reject", name="wrong sampler")):
        assert f"for rank 0 of 3, but this is rank {rank} of 2" in case["result"]
    for case in select(ranks, case="reject", name="constant on purpose"):
        assert case["result"] == 2
        assert "the same first batch" in case["warnings"][0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_uneven_data_trains_as_one_process(ranks, accumulate):
    """17 examples in global batches of 8: the last has one example, and rank 1 none of it."""
    single, both = (select(ranks, case="training", accumulate=accumulate, world_size=n) for n in (1, 2))
    assert both[0]["weights"] == both[1]["weights"]
    assert both[0]["steps"] == single[0]["steps"]
    assert both[0]["weights"] == pytest.approx(single[0]["weights"], rel=1e-5, abs=1e-6)
