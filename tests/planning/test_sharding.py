"""Sharding formulas compared with published numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.backends.buckets import BucketBytes
from halfstep.errors import SettingError
from halfstep.planning.ranks.parts import Units
from halfstep.planning.ranks.shards import Part, count_parts
from halfstep.planning.replay import Peak
from halfstep.planning.sharding import (
    STRATEGIES,
    Layout,
    deepspeed_bytes,
    layout_of,
    megatron_bytes,
    per_gpu,
    rejection,
    retained_bytes,
    state_bytes,
    valid_counts,
    zero_paper_bytes,
)
from halfstep.precision.policy import Policy


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_paper_figure_1(stage, gigabytes):
    """7.5 billion parameters on 64 GPUs need the memory in figure 1 of the ZeRO paper."""
    assert zero_paper_bytes(7.5e9, 64, stage) / 1e9 == pytest.approx(gigabytes, rel=0.005)


@pytest.mark.parametrize("num_gpus", [1, 8, 64])
def test_megatron_needs_18_bytes_or_6_and_12_sharded(num_gpus):
    """Megatron's optimizer needs 18 bytes per parameter, the distributed one 6 + 12 / N."""
    assert megatron_bytes(1, num_gpus, distributed_optimizer=False) == 18
    assert megatron_bytes(1, num_gpus, distributed_optimizer=True) == pytest.approx(6 + 12 / num_gpus)


@pytest.mark.parametrize("num_gpus", [1, 4, 32])
def test_deepspeed_estimators(num_gpus):
    """DeepSpeed's estimators give 2 + 18 / N for ZeRO 2, and 18 / N with one full layer for ZeRO 3."""
    assert deepspeed_bytes(1e9, num_gpus, 2) == pytest.approx(1e9 * (2 + 18 / num_gpus))
    assert deepspeed_bytes(1e9, num_gpus, 3, 1e7) == pytest.approx(18e9 / num_gpus + 4e7)


@pytest.mark.parametrize("stage", [-1, 4])
def test_unknown_stage_is_rejected(stage):
    """The error for a stage that does not exist names it."""
    with pytest.raises(SettingError, match="not a ZeRO stage"):
        zero_paper_bytes(1, 2, stage)


@pytest.mark.parametrize(
    ("precision", "total"), [("fp32", 16), ("bf16", 16), ("bf16-lean", 14), ("bf16-lean,states=8bit", 8.03125)]
)
def test_bytes_per_parameter(precision, total):
    """fp32 and autocast store the same 16 bytes per parameter; lean presets store less."""
    assert state_bytes(Policy.parse(precision)).total == total


def test_accumulation_stores_fp32_gradients():
    """A lean policy that accumulates stores its gradients in fp32: two bytes more."""
    policy = Policy.parse("bf16-lean")
    assert state_bytes(policy, accumulate=4).total == state_bytes(policy).total + 2


PEAK = Peak(
    allocated=160, reserved=200, moment="backward", module="", modules={}, phases={},
    breakdown={"weights": 40, "states": 84, "activations": 30, "cast cache": 10},
)  # fmt: skip
# One parameter of ten rows, of which each rank has a chunk; the states have a step count of 4 bytes as well.
PARTS = count_parts([Part("weights", (10,), 4), Part("gradients", (10,), 4), Part("states", (10,), 8)])
LAYOUT = Layout(PARTS, Units(largest=0, root=10), param_bytes=4, compute_bytes=2, reduce_bytes=4)


def test_one_gpu_shards_nothing():
    """On one GPU every strategy needs the memory of the traced step."""
    assert all(per_gpu(PEAK, LAYOUT, strategy, 1) == PEAK.breakdown for strategy in STRATEGIES)


@given(st.sampled_from(sorted({*STRATEGIES} - {"hsdp"})), st.integers(2, 64))
def test_more_gpus_never_store_more_on_each(strategy, num_gpus):
    """At the same micro-batch, one more GPU never increases the model state of each."""
    fewer, more = (per_gpu(PEAK, LAYOUT, strategy, n) for n in (num_gpus, num_gpus + 1))
    assert all(more[name] <= fewer[name] for name in ("weights", "states"))


def test_each_strategy_shards_its_categories():
    """ZeRO 1 shards states, FSDP2 weights as well, in chunks of whole rows; activations and step counts are on every rank."""
    one, full = per_gpu(PEAK, LAYOUT, "zero1", 4), per_gpu(PEAK, LAYOUT, "fsdp", 4)
    assert (one["states"], one["weights"]) == (20 + 4, 40)
    assert (full["states"], full["weights"], full["activations"]) == (3 * 8 + 4, 3 * 4, 30)


def test_zero_stores_fp32_masters_and_sums():
    """DeepSpeed has masters of fp32 weights, too; gradients are whole at stage 1, with bf16 weights in both formats."""
    peak = replace(PEAK, breakdown=PEAK.breakdown | {"gradients": 40})
    assert [per_gpu(peak, LAYOUT, f"zero{stage}", 4)["master"] for stage in (1, 2, 3)] == [12, 12, 12]
    assert [per_gpu(peak, LAYOUT, f"zero{stage}", 4)["gradients"] for stage in (1, 2, 3)] == [40, 12, 12]
    bf16 = replace(LAYOUT, weights="bf16")
    assert per_gpu(peak, bf16, "zero1", 4)["gradients"] == 60


def test_autocast_copies_gathered_weights():
    """FSDP2 gathers weights as they are stored, so autocast's copies stay; ZeRO 3 gathers them in the compute dtype."""
    assert per_gpu(PEAK, LAYOUT, "fsdp", 4)["cast cache"] == 10
    assert "cast cache" not in per_gpu(PEAK, LAYOUT, "zero3", 4)


def test_fsdp_accumulates_whole_gradients():
    """From the second micro-batch on, every GPU has the whole gradients."""
    peak = replace(PEAK, breakdown=PEAK.breakdown | {"gradients": 40, "activations": 300})
    assert per_gpu(peak, LAYOUT, "fsdp", 4)["gradients"] == 3 * 4
    window = replace(LAYOUT, accumulate=2, reduce_bytes=2)
    assert per_gpu(peak, window, "fsdp", 4)["gradients"] == retained_bytes(window) == 40


@pytest.mark.parametrize(
    ("precision", "num_bytes"),
    [("bf16", 4), ("bf16,reduce=bf16", 4), ("bf16-lean,reduce=bf16", 4), ("bf16-lean,grads=bf16,reduce=bf16", 2)],
)
def test_whole_gradients_are_fp32(precision, num_bytes):
    """Unless they are stored and reduced in one 16-bit format: the reduce dtype alone is that of the messages."""
    policy = Policy.parse(precision)
    size = 4 if policy.grads_format(2) == "fp32" else 2
    layout = layout_of(policy, count_parts([Part("gradients", (10,), size)]), Units(0, 10), (), 2)
    assert retained_bytes(layout) == 10 * num_bytes


def test_sharding_moves_the_peak_to_the_activations():
    """One GPU has its peak with all gradients; where they are sharded, all activations need more."""
    end, start = {"weights": 40, "gradients": 400}, {"weights": 40, "gradients": 4, "activations": 300}
    peak = replace(PEAK, breakdown=end, others=(start, end))
    parts = count_parts([Part("weights", (10,), 4), Part("gradients", (10,), 40)])
    layout = replace(LAYOUT, parts=parts, buckets=(BucketBytes(400, 400),))
    sizes = per_gpu(peak, layout, "fsdp", 10)
    assert (sizes["activations"], sizes["gradients"]) == (300, 1)
    assert "activations" not in per_gpu(peak, layout, "ddp", 10)


def test_hsdp_shards_within_groups():
    """The groups have copies: more of them change nothing, and numbers that do not fill groups are rejected."""
    assert (
        per_gpu(PEAK, LAYOUT, "hsdp", 8, 4) == per_gpu(PEAK, LAYOUT, "hsdp", 4, 4) == per_gpu(PEAK, LAYOUT, "fsdp", 4)
    )
    assert list(valid_counts("hsdp", 13, 4)) == [1, 2, 3, 4, 8, 12]
    with pytest.raises(SettingError, match="groups of 4"):
        per_gpu(PEAK, LAYOUT, "hsdp", 6, 4)


def test_gathered_rows_are_padded():
    """A parameter of one row is gathered as if every rank had one."""
    parts = count_parts([Part("weights", (1, 100), 4, at_root=True), Part("gradients", (1, 100), 4)])
    one = Layout(parts, Units(0, 100), param_bytes=4, compute_bytes=4, reduce_bytes=4)
    fewer, more = (per_gpu(PEAK, one, "fsdp", n)["communication"] for n in (2, 64))
    assert more - fewer == (64 - 2) * 100 * (4 + 4)


def test_ddp_buckets_are_as_wide_as_the_reduction():
    """16-bit gradients that are summed in fp32 need two more bytes per element while they are sent, and no second copy."""
    parts = count_parts([Part("gradients", (1 << 26,), 2)])
    size = 2 * (1 << 26)
    lean = Layout(parts, Units(0, 1 << 26), 2, 2, reduce_bytes=4, buckets=(BucketBytes(2 * size, size),))
    half = replace(lean, reduce_bytes=2, buckets=(BucketBytes(size, size),))
    more = per_gpu(PEAK, lean, "ddp", 2)["communication"] - per_gpu(PEAK, half, "ddp", 2)["communication"]
    assert more == 2 * (1 << 26) + 2 * (1 << 26)  # all of them at the end, and the bucket of this one parameter


@pytest.mark.parametrize(
    ("strategy", "precision", "elementwise", "reason"),
    [
        ("zero2", "bf16-lean", True, "fp32 masters"),
        ("zero3", "bf16-lean,master=fp32,states=8bit", True, "fp32 masters"),
        ("fsdp", "bf16", False, "whole matrices"),
        ("zero1", "bf16-lean,master=fp32", True, ""),
        ("ddp", "bf16-lean,states=8bit", False, ""),
        ("fsdp", "bf16-lean,states=8bit", True, ""),
    ],
)
def test_impossible_combinations_have_a_reason(strategy, precision, elementwise, reason):
    """Split masters under ZeRO and matrix optimizers on shards are rejected, everything else is planned."""
    answer = rejection(strategy, Policy.parse(precision), elementwise=elementwise)
    assert reason in answer
    assert bool(answer) == bool(reason)


def test_unknown_strategy_is_named():
    """The error for an unknown strategy lists the known ones."""
    with pytest.raises(SettingError, match="fsdp"):
        per_gpu(PEAK, LAYOUT, "fsd", 2)


def test_errors_of_a_compressed_optimizer_are_counted_for_its_share_as_a_server():
    """Each rank of ddp stores 4 bytes for every element that it serves."""
    compressed = replace(LAYOUT, compressed=(64, 800))
    for num_gpus in (2, 4):
        more = per_gpu(PEAK, compressed, "ddp", num_gpus)["states"] - per_gpu(PEAK, LAYOUT, "ddp", num_gpus)["states"]
        assert more == 4 * (64 + 800) // num_gpus
