"""Merging keeps what Halfstep does not decide, reports what it does, and changes nothing twice."""

import copy
import json
import re
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import HalfstepError, SettingError
from halfstep.precision.deepspeed_batches import Batches, read_batches
from halfstep.precision.deepspeed_keys import BLOCKS, NOT_READ, READ, REJECTED
from halfstep.precision.deepspeed_merge import Choices, Decision, merge_config
from halfstep.precision.deepspeed_optimizers import zero_support_of_class
from halfstep.precision.policy import Policy

ROOT = Path(__file__).resolve().parents[2]
VERSION = (0, 19, 8)
FILE = {
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": True, "initial_scale_power": 32},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 500000, "overlap_comm": True},
    "flops_profiler": {"enabled": True, "profile_step": 3},
}


def merge(config, **choices):
    """Merge for DeepSpeed 0.19.8."""
    return merge_config(config, Choices(**choices), VERSION)


def test_the_file_is_not_changed():
    """The caller's dictionary stays as it was."""
    before = copy.deepcopy(FILE)
    merge(FILE, policy=Policy.parse("bf16-lean"), max_norm=None, optimizer="torch.optim.adamw.AdamW")
    assert before == FILE


def test_other_keys_reach_deepspeed_unchanged():
    """Whatever does not decide precision, clipping or accumulation is passed on."""
    config = merge(FILE).config
    assert config["flops_profiler"] == FILE["flops_profiler"]
    assert config["zero_optimization"] == FILE["zero_optimization"]


def test_every_difference_is_a_decision():
    """The keys that Halfstep changes are reported, once each, and no others."""
    merged = merge(FILE, policy=Policy.parse("bf16-lean"), accumulate=2, max_norm=0.5)
    assert len(merged.decisions) == 6
    assert {str(decision).split(":")[0] for decision in merged.decisions} == {
        "fp16.enabled", "bf16.enabled", "data_types.grad_accum_dtype", "communication_data_type", "gradient_clipping",
        "gradient_accumulation_steps",
    }  # fmt: skip
    assert "fp16" not in merged.config


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-lean", "fp16-lean", "fp16-lean,loss_scale=128"])
def test_merging_again_decides_nothing(precision):
    """The result is a fixed point: it already has everything that Halfstep decides."""
    merged = merge(FILE, policy=Policy.parse(precision), accumulate=4, max_norm=1.0)
    again = merge(merged.config)
    assert again.decisions == ()
    assert (again.config, again.policy, again.accumulate) == (merged.config, merged.policy, merged.accumulate)


def test_driven_configuration_is_merged():
    """Where Halfstep drives, what it takes over is reported with that reason, and the result keeps the user's settings."""
    config = FILE | {"fp16": {"enabled": True}, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5}
    merged = merge(config, driver="halfstep", optimizer="torch.optim.sgd.SGD")
    assert (merged.policy, merged.max_norm, merged.accumulate) == (Policy.parse("fp16-lean"), 0.5, 4)
    assert merged.config["fp16"] == {"enabled": True, "loss_scale": 1.0}
    reasons = {decision.key: (decision.ours, decision.reason) for decision in merged.decisions}
    assert reasons["fp16.loss_scale"] == (1.0, "Halfstep scales the loss, by the policy's rule")
    assert reasons["gradient_clipping"] == (0.0, "Halfstep clips at 0.5")
    assert reasons["gradient_accumulation_steps"][0] == 1
    assert reasons["zero_allow_untested_optimizer"][0] is True
    assert "D12" not in {fault.id for fault in merged.faults}


@pytest.mark.parametrize(
    ("version", "stage", "words"),
    [
        ((0, 19, 7), 0, "DeepSpeed 0.19.7 removed"),
        ((0, 19, 7), 1, "DeepSpeed 0.19.7 removed"),
        ((0, 19, 6), 1, "use stage 0"),
    ],
)
def test_one_bit_optimizer_is_rejected_by_version(version, stage, words):
    """Releases without 1-bit optimizers are named as the cause, earlier ones reject them with ZeRO only."""
    config = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": stage}}
    with pytest.raises(SettingError, match=words):
        merge_config(config, Choices(), version)
    merged = merge_config(config | {"zero_optimization": {"stage": 0}}, Choices(), (0, 19, 6))
    assert merged.config["optimizer"] == config["optimizer"]


@pytest.mark.parametrize(
    ("path", "support"),
    [
        ("torch.optim.adamw.AdamW", "tested"),
        ("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam", "tested"),
        ("mine.AdamW", "unknown"),
        ("torch.optim.sgd.SGD", "elementwise"),
        ("torch.optim._muon.Muon", "by layer"),
        ("torch.optim.lbfgs.LBFGS", "by layer"),
        ("apex.optimizers.FusedLAMB", "by layer"),
        ("torch.optim.sparse_adam.SparseAdam", "unknown"),
        ("deepspeed.runtime.fp16.onebit.adam.OnebitAdam", "one bit"),
    ],
)
def test_optimizer_objects_are_judged_by_their_class(path, support):
    """ZeRO accepts exact classes only; others differ in whether a shard of them can be stepped."""
    assert zero_support_of_class(path) == support


def test_faults_are_those_of_the_merged_configuration():
    """The faults are those of the result: what Halfstep avoids is gone, what it does itself is listed."""
    assert {"D12", "D83"} <= {fault.id for fault in merge(FILE).faults}
    assert not {"D07", "D36", "D40"} & {fault.id for fault in merge(FILE).faults}


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (Decision("a.b", None, 1.0, "because"), "a.b: not set, 1.0 in this run; because."),
        (Decision("a", "x", None, "because"), "a: 'x' in the file, removed; because."),
        (Decision("a", 1, 2, "because"), "a: 1 in the file, 2 in this run; because."),
    ],
)
def test_decision_is_one_line(decision, text):
    """A decision prints the key, the file's value, ours and the reason."""
    assert str(decision) == text


@pytest.mark.parametrize(
    ("config", "choices", "batches"),
    [
        ({}, {}, Batches(1, 1, is_decided=False)),
        ({"train_micro_batch_size_per_gpu": 4}, {}, Batches(4, 1)),
        ({"train_batch_size": 64}, {}, Batches(1, 1, is_decided=False)),
        ({"train_batch_size": 64}, {"world_size": 8}, Batches(8, 1)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, {"world_size": 8}, Batches(4, 2)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, {"world_size": 8}, Batches(2, 4)),
        ({"train_batch_size": 64}, {"world_size": 2, "batch_size": 8}, Batches(8, 4)),
        ({"gradient_accumulation_steps": "auto"}, {"accumulate": 3}, Batches(1, 3, is_decided=False)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, {"batch_size": 2}, Batches(2, 1)),
    ],
)
def test_batches_are_read_as_deepspeed_computes_them(config, choices, batches):
    """The program's numbers come first, then the file's, then their quotient."""
    assert read_batches(config, **{"accumulate": None, "batch_size": None, "world_size": None} | choices) == batches


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_batch_size": 0}, "train_batch_size=0"),
        ({"train_micro_batch_size_per_gpu": 1.5}, "whole number"),
        ({"gradient_accumulation_steps": "auto"}, "pass accumulate"),
        ({"train_batch_size": 9}, "not a multiple of 2"),
        ({"train_batch_size": "CONFIG_SIZE"}, "it must be a number"),
    ],
)
def test_impossible_batches_are_rejected(config, words):
    """Sizes that are not counts, or do not divide, raise with the key."""
    with pytest.raises(SettingError, match=words):
        read_batches(config, accumulate=None, batch_size=None, world_size=2)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.floats(),
    st.sampled_from(["auto", "true", "fp16", "bf16", "fp32", "AdamW", "SGD"]),
)
anything = st.recursive(
    leaves,
    lambda v: (
        st.lists(v, max_size=2) | st.dictionaries(st.sampled_from(["stage", "enabled", "type", "params", "x"]), v)
    ),
    max_leaves=4,
)
blocks = {name: st.dictionaries(st.sampled_from(keys), leaves, max_size=4) for name, keys in BLOCKS.items()}
values = {name: st.one_of(block, anything) for name, block in blocks.items()}
values |= dict.fromkeys((*READ[len(BLOCKS) :], *NOT_READ, *REJECTED, "unknown"), anything)
values |= {"zero_optimization": st.fixed_dictionaries({"stage": st.integers(0, 3)}) | anything}
entries = st.sampled_from(sorted(values)).flatmap(lambda key: st.tuples(st.just(key), values[key]))
configs = st.lists(entries, max_size=4).map(dict)


@given(
    configs,
    st.sampled_from([None, "fp32", "bf16", "bf16-lean", "fp16-lean"]),
    st.sampled_from([None, "torch.optim.adamw.AdamW"]),
)
def test_any_configuration_is_merged_or_raises_only_our_error(config, precision, optimizer):
    """A configuration of any shape gives a complete result without "auto", or one of Halfstep's errors."""
    policy = None if precision is None else Policy.parse(precision)
    try:
        merged = merge(config, policy=policy, optimizer=optimizer)
    except HalfstepError:
        return
    texts = json.dumps([value for key, value in merged.config.items() if key != "data_types"])
    assert '"auto"' not in texts
    assert merged.config["gradient_clipping"] == (merged.max_norm or 0.0)


def test_page_runs(capsys):
    """The Python of the configuration section of docs/deepspeed.md runs, and its assertions are true."""
    page = (ROOT / "docs" / "deepspeed.md").read_text().partition("## Configuration")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/deepspeed.md", "exec"), {})
    assert "fp16.initial_scale_power: 32 in the file, 24 in this run; Halfstep caps" in capsys.readouterr().out


def test_example_runs(capsys):
    """The example shows a written configuration and the decisions of a merged one."""
    runpy.run_path(str(ROOT / "examples" / "merge_deepspeed_config.py"), run_name="__main__")
    assert "bf16.enabled: 'auto' in the file, True in this run" in capsys.readouterr().out


def test_a_batch_size_that_differs_from_the_file_is_reported():
    """With the product of this run; the size that the file decides is returned."""
    config = {"zero_optimization": {"stage": 2}, "train_batch_size": 64, "gradient_accumulation_steps": 2}
    assert merge(config, world_size=4).batch_size == 8
    decision = next(d for d in merge(config, world_size=4, batch_size=2).decisions if d.key == "train_batch_size")
    assert (decision.theirs, decision.ours) == (64, 16)
    assert "2 samples per rank" in decision.reason
    assert merge({"zero_optimization": {"stage": 2}}).batch_size is None
