"""Planned bytes compared with what gloo ranks of the Engine's own backends store, send and retain."""

from pathlib import Path

import pytest

from rank_processes import cases_of_ranks

PROGRAM = Path(__file__).parents[2] / "planning_engine_program.py"


@pytest.fixture(scope="module")
def two():
    """The cases of two ranks: a list of what each rank printed."""
    return list(zip(*cases_of_ranks(PROGRAM), strict=True))


def of(cases, kind):
    """The ranks of the cases of one kind, which must be there."""
    chosen = [rank for ranks in cases for rank in ranks if rank["case"].startswith(f"{kind} ")]
    assert chosen, f"no case of {kind}"
    return chosen


def check_storage(cases):
    """Every rank of every case stores what was planned, and ranks differ where shards are uneven."""
    for ranks in cases:
        for rank in ranks:
            assert rank["measured"] == rank["planned"], rank
            assert min(rank["measured"][name] for name in ("weights", "gradients", "states")) > 0, rank
    uneven = [ranks for ranks in cases if len({rank["measured"]["states"] for rank in ranks}) > 1]
    assert {ranks[0]["case"].split()[0] for ranks in uneven} >= {"fsdp"}


def check_retained(cases, kind="fsdp"):
    """Between micro-batches every rank retains whole gradients, and none after the last."""
    for rank in of(cases, kind):
        assert rank["retained"] == rank["retained_planned"], rank
    assert any(max(rank["retained"]) > 0 for rank in of(cases, kind))


def check_traffic(cases, num_ranks):
    """The collectives send what was planned, and one small message per update in which the ranks agree."""
    for ranks in cases:
        for rank in ranks:
            numbers = num_ranks + (4 if rank["case"].startswith("ddp") else 5)
            agreed = 2 * 4 * numbers * (num_ranks - 1) // num_ranks
            expected = rank["traffic"] | {"all_reduce": rank["traffic"]["all_reduce"] + agreed}
            assert expected.pop("compressed") == 0  # this optimizer sends dense gradients
            assert rank["sent"] == expected, rank


def check_buckets(cases):
    """One reduction per window, whose messages are those of the plan, bucket by bucket."""
    for rank in of(cases, "ddp"):
        assert rank["count"] == 1, rank
        measured, planned = rank["buckets"]
        assert measured == planned, rank
        assert rank["messages"] == [sum(planned)] * 2, rank
    assert max(len(rank["buckets"][0]) for rank in of(cases, "ddp")) > 2


def test_ranks_store_what_is_planned(two):
    """Weights, gradients, masters and states of backend="ddp" and backend="fsdp", to the byte."""
    check_storage(two)


def test_accumulation_retains_whole_gradients(two):
    """In fp32, or in 16 bits where they are stored and reduced in one format."""
    check_retained(two)


def test_collectives_send_what_is_planned(two):
    """Padding included."""
    check_traffic(two, 2)


def test_messages_of_ddp_are_those_of_its_buckets(two):
    """`engine.backend.reductions` counts what the plan sends."""
    check_buckets(two)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_more_layouts(num_ranks):
    """Reduced in bf16, with fp32 masters or modules; on four ranks also replicated and sharded (HSDP)."""
    cases = list(zip(*cases_of_ranks(PROGRAM, "all", ranks=num_ranks), strict=True))
    check_storage(cases)
    check_retained(cases)
    check_traffic(cases, num_ranks)
    check_buckets(cases)
    if num_ranks == 4:
        check_retained(cases, "hsdp")
        assert min(rank["traffic"]["all_reduce"] for rank in of(cases, "hsdp")) > 0
