"""Sharding formulas compared with published numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import SettingError
from halfstep.planning.replay import Peak
from halfstep.planning.sharding import (
    STRATEGIES,
    Layout,
    deepspeed_bytes,
    megatron_bytes,
    per_gpu,
    state_bytes,
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
    breakdown={"weights": 40, "states": 80, "activations": 30, "cast cache": 10},
)  # fmt: skip
LAYOUT = Layout(num_params=10, unit_params=2, compute_bytes=2, grad_bytes=4, reduce_bytes=4)


def test_one_gpu_shards_nothing():
    """On one GPU every strategy needs the memory of the traced step."""
    assert all(per_gpu(PEAK, LAYOUT, strategy, 1) == PEAK.breakdown for strategy in STRATEGIES)


@given(st.sampled_from(sorted(STRATEGIES)), st.integers(2, 64))
def test_more_gpus_never_need_more_on_each(strategy, num_gpus):
    """At the same micro-batch, one more GPU never increases the memory of each."""
    fewer = sum(per_gpu(PEAK, LAYOUT, strategy, num_gpus).values())
    assert sum(per_gpu(PEAK, LAYOUT, strategy, num_gpus + 1).values()) <= fewer


def test_each_strategy_shards_its_categories():
    """ZeRO 1 shards states, FSDP weights as well; activations are not sharded, and gathered weights need no cast cache."""
    one, full = per_gpu(PEAK, LAYOUT, "zero1", 4), per_gpu(PEAK, LAYOUT, "fsdp", 4)
    assert (one["states"], one["weights"]) == (20, 40)
    assert (full["states"], full["weights"], full["activations"]) == (20, 10, 30)
    assert "cast cache" not in full


def test_unknown_strategy_is_named():
    """The error for an unknown strategy lists the known ones."""
    with pytest.raises(SettingError, match="fsdp"):
        per_gpu(PEAK, LAYOUT, "fsd", 2)
