"""The volume of communication compared with published numbers; those of real ranks are in test_engine and test_shards."""

from dataclasses import replace

import pytest

from halfstep.optim.onebit.allreduce import compressed_bytes
from halfstep.planning.ranks.communication import Model, Traffic, traffic
from halfstep.planning.ranks.shards import Part, count_parts

# 2 bytes for each of 1,024,000 weights in units, and as many for their gradients: "psi" of the ZeRO paper is 1,024,000.
PSI = 1_024_000
MODEL = Model(
    count_parts([Part("weights", (1024, 1000), 2)]),
    count_parts([Part("gradients", (1024, 1000), 2)]),
    2 * PSI,
    count_parts([Part("gradients", (1024, 1000), 2)]),
)


@pytest.mark.parametrize(("strategy", "volume"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3), ("fsdp", 3)])
def test_volumes_are_those_of_the_zero_paper(strategy, volume):
    """Data parallelism and ZeRO 1 and 2 send 2 psi elements, ZeRO 3 and FSDP 3 psi (section 7), up to (N - 1) / N."""
    assert traffic(MODEL, strategy, 1024).total / 2 == pytest.approx(volume * PSI * 1023 / 1024)


@pytest.mark.parametrize(
    ("strategy", "gathers", "scatters", "reduces"),
    [("ddp", 0, 0, 2), ("zero1", 1, 1, 0), ("zero2", 1, 4, 0), ("zero3", 8, 4, 0), ("fsdp", 8, 1, 0)],
)
def test_accumulation_repeats_what_each_micro_batch_needs(strategy, gathers, scatters, reduces):
    """With 4 micro-batches gathers repeat; gradients are sent once, except where they are sharded while they accumulate."""
    one = 2 * PSI * 3 // 4
    sent = traffic(MODEL, strategy, 4, accumulate=4)
    assert sent == Traffic(gathers * one, scatters * one, reduces * one)


def test_one_gpu_sends_nothing():
    """Nor does a group of one."""
    for strategy in ("ddp", "zero1", "fsdp", "hsdp", "zero3"):
        assert traffic(MODEL, strategy, 1).total == 0


def test_hsdp_reduces_shards_between_groups():
    """Within a group it is FSDP2; between groups each GPU reduces its shard's gradients only."""
    within, sent = traffic(MODEL, "fsdp", 8), traffic(MODEL, "hsdp", 64, group=8)
    assert (sent.all_gather, sent.reduce_scatter) == (within.all_gather, within.reduce_scatter)
    assert sent.all_reduce == 2 * (2 * PSI // 8) * 7 // 8
    assert traffic(MODEL, "hsdp", 8, group=8) == within


def test_the_root_is_gathered_once():
    """Parameters outside the units stay gathered from forward to backward."""
    root = Model(count_parts([Part("weights", (1024, 1000), 2, at_root=True)]), ())
    assert 2 * traffic(root, "fsdp", 4).all_gather == traffic(MODEL, "fsdp", 4).all_gather


def test_few_rows_are_padded_on_many_gpus():
    """FSDP2 exchanges equal shards, so a parameter of one row is sent as one row per GPU."""
    one = Model(count_parts([Part("weights", (1, 500), 2, at_root=True)]), ())
    assert traffic(one, "fsdp", 64).all_gather == 63 * 1000


def test_time_is_bytes_over_bus_bandwidth():
    """As nccl-tests defines it."""
    assert Traffic(3, 2, 5).seconds(20.0) == 0.5


def test_a_compressed_step_sends_one_bit_per_element():
    """Next to the dense steps of ddp: signs and scales of the tensors that the optimizer compresses; shards send none."""
    compressed = traffic(replace(MODEL, compressed=(1000, 24)), "ddp", 4)
    assert compressed.compressed == compressed_bytes((1000, 24), 4) == 2 * 3 * (32 + 1 + 2 * 4)
    assert compressed.total == traffic(MODEL, "ddp", 4).total
    assert traffic(MODEL, "ddp", 4).compressed == 0
