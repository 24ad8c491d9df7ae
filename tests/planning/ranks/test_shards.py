"""Planned bytes of shards and of communication compared with ranks of torch's own loops; test_engine has the Engine's."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.planning.ranks.shards import Part, count_parts, fsdp_bytes, local_rows, whole_bytes
from rank_processes import cases_of_ranks

PROGRAM = Path(__file__).parents[2] / "planning_ranks_program.py"


@pytest.fixture(scope="module")
def two():
    """The cases of two ranks of torch's own loops, by name."""
    return by_case(cases_of_ranks(PROGRAM))


def by_case(lines):
    """What each rank printed, by case."""
    return {ranks[0]["case"]: ranks for ranks in zip(*lines, strict=True)}


def named(cases, prefix):
    """The cases of a kind, which must be there."""
    chosen = [rank for name, ranks in cases.items() if name.startswith(prefix) for rank in ranks]
    assert chosen, f"no case starts with {prefix!r}"
    return chosen


def check_storage(cases):
    """Every rank of every case stores what was planned, and the ranks differ where shards are uneven."""
    for rank in [*named(cases, "fsdp"), *named(cases, "ddp")]:
        assert rank["measured"] == rank["planned"], rank
    states = {rank["measured"]["states"] for rank in cases["fsdp bf16-lean"]}
    assert len(states) > 1, "no shard is uneven"


def check_accumulation(cases):
    """Between micro-batches FSDP2 retains whole gradients in the reduce dtype, and none after the last."""
    for rank in named(cases, "accumulated"):
        assert rank["retained"] == [rank["planned"], rank["planned"], 0], rank


def check_traffic(cases):
    """The collectives send what was planned: one reduce-scatter per window, gathers in every micro-batch."""
    for rank in [*named(cases, "fsdp"), *named(cases, "accumulated")]:
        assert rank["sent"] | {"compressed": 0} == rank["traffic"], rank


@pytest.mark.slow
def test_ranks_store_what_is_planned(two):
    """Weights, gradients, masters and states of FSDP2 and DDP, to the byte, in fp32, lean and 8-bit layouts."""
    check_storage(two)


@pytest.mark.slow
def test_accumulation_retains_whole_gradients(two):
    """What `set_requires_gradient_sync(False)` keeps on every rank is planned to the byte."""
    check_accumulation(two)


@pytest.mark.slow
def test_collectives_send_what_is_planned(two):
    """The bytes of every all-gather and reduce-scatter, padding included."""
    check_traffic(two)


@pytest.mark.slow
def test_wrapped_ddp_has_a_second_copy_of_gradients(two):
    """In the buckets, unless the gradients are views of them."""
    for rank in named(two, "ddp fp32") + named(two, "ddp bf16-lean"):
        assert rank["buckets"] == rank["measured"]["gradients"]
        assert rank["extra"] == (0 if rank["case"].endswith("True") else rank["buckets"])


@pytest.mark.slow
def test_autocast_keeps_a_16_bit_copy_of_every_gathered_weight(two):
    """Backward needs the copies, so FSDP2 under autocast has all weights in 16 bits until then."""
    for rank in named(two, "autocast"):
        assert rank["copies"] == rank["planned"] > 0


@pytest.mark.slow
def test_four_ranks_store_and_send_what_is_planned():
    """Also with empty shards and on a mesh that replicates and shards."""
    cases = by_case(cases_of_ranks(PROGRAM, ranks=4))
    for check in (check_storage, check_accumulation, check_traffic):
        check(cases)
    for rank in named(cases, "hsdp"):
        assert rank["measured"] == rank["planned"], rank
        assert rank["sent"] | {"compressed": 0} == rank["traffic"], rank
        assert rank["sent"]["all_reduce"] > 0


@given(st.integers(1, 300), st.integers(1, 70))
def test_rows_are_those_of_torch_chunk(num_rows, num_ranks):
    """Every rank has the rows of its chunk, and ranks beyond the last chunk have none."""
    chunks = [len(chunk) for chunk in torch.arange(num_rows).chunk(num_ranks)]
    rows = [local_rows(num_rows, num_ranks, rank) for rank in range(num_ranks)]
    assert rows == chunks + [0] * (num_ranks - len(chunks))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 9))
def test_shards_cover_the_whole(shape, num_ranks):
    """Unpadded shards add up to the tensor; rank 0 has the most of everything."""
    parts = count_parts([Part("states", tuple(shape), 4), Part("weights", tuple(shape), 2)])
    ranks = [fsdp_bytes(parts, num_ranks, rank) for rank in range(num_ranks)]
    assert sum(rank["states"] for rank in ranks) == whole_bytes(parts)["states"]
    assert all(rank[name] <= ranks[0][name] for rank in ranks for name in rank)
    assert len({rank["weights"] for rank in ranks}) == 1


def test_blocks_are_counted_per_shard():
    """A shard of 8-bit moments has a scale for every started block of its own."""
    scales = count_parts([Part("states", (3, 200), 4, block=256)])
    assert [fsdp_bytes(scales, 2, rank)["states"] for rank in range(2)] == [8, 4]
