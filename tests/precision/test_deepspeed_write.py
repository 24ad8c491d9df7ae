"""A policy becomes a DeepSpeed configuration that is read back as the same policy, or is rejected with the reason."""

import dataclasses
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import SettingError
from halfstep.precision.loss_scale import LossScale
from halfstep.precision.policy import PRESETS, VALUES, Policy, read_deepspeed
from rank_processes import free_port

TORCH_SCALE = "dynamic(semantics=torch;growth_interval=2000)"


def expressible(policy, **settings):
    """The configuration, or None when the policy is rejected."""
    try:
        return policy.to_deepspeed(**settings)
    except SettingError:
        return None


def valid_policy(fields):
    """The policy of these fields, or None when they contradict each other."""
    try:
        return Policy(**fields)
    except SettingError:
        return None


scales = st.one_of(
    st.just("none"),
    st.just(TORCH_SCALE),
    st.floats(2.0**-10, 2.0**20).map(lambda scale: str(LossScale(mode="static", init_scale=scale))),
    st.builds(
        lambda **settings: str(LossScale.dynamic(**settings)),
        semantics=st.sampled_from(["deepspeed", "deepspeed-consecutive", "megatron"]),
        init_scale=st.sampled_from([2.0**power for power in (8, 12, 16, 24)] + [1000.0]),
        growth_interval=st.integers(1, 5000),
        hysteresis=st.integers(1, 5),
        min_scale=st.sampled_from([1.0, 2.0, 0.5, 256.0]),
        max_scale=st.sampled_from([2.0**24, 2.0**24, 2.0**25]),
    ),
)
policies = (
    st.fixed_dictionaries(
        {key: st.sampled_from(values) for key, values in VALUES.items() if key != "params"}
        | {"loss_scale": scales, "keep_fp32": st.just(()), "compute_fp32": st.just(())}
    )
    .flatmap(lambda fields: st.sampled_from(VALUES["params"]).map(lambda params: fields | {"params": params}))
    .map(valid_policy)
    .filter(lambda policy: policy is not None)
)
presets = st.sampled_from(list(PRESETS.values()))
scaled_presets = st.builds(
    lambda scale: Policy(params="fp16", compute="fp16", master="split", loss_scale=scale),
    scales.filter(lambda s: s != "none"),
)
settings_of_a_run = st.fixed_dictionaries({
    "stage": st.integers(0, 3),
    "max_norm": st.none() | st.floats(1e-6, 1e6),
    "accumulate": st.integers(1, 64),
    "batch_size": st.integers(1, 512),
    "offload_optimizer": st.booleans(),
})  # fmt: skip


def as_read(policy, accumulate):
    """The policy in the form in which it is read back: see the docstring of deepspeed_write."""
    grads = policy.grads_format(accumulate)
    automatic = dataclasses.replace(policy, grads="auto").grads_format(accumulate)
    if policy.master == "none":
        return dataclasses.replace(policy, grads=grads)  # one switch sets both
    master = "split" if policy.master == "fp32" else policy.master
    return dataclasses.replace(policy, master=master, grads="auto" if grads == automatic else grads)


@given(st.one_of(policies, presets, scaled_presets), settings_of_a_run)
def test_round_trip(policy, settings):
    """Whatever can be written is read back as the same policy, clipping norm and number of micro-batches."""
    config = expressible(policy, **settings)
    if config is None:
        return
    reading = read_deepspeed(json.loads(json.dumps(config)))
    assert reading.policy == as_read(policy, settings["accumulate"])
    assert (reading.max_norm, reading.accumulate) == (settings["max_norm"], settings["accumulate"])


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-lean", "fp16-lean"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_presets_are_read_back_literally(name, accumulate, stage):
    """The presets that DeepSpeed has come back as they are at every ZeRO stage."""
    policy = Policy.parse(name)
    assert Policy.from_deepspeed(policy.to_deepspeed(stage=stage, accumulate=accumulate)) == policy


@given(st.one_of(policies, presets, scaled_presets), settings_of_a_run)
def test_every_decision_is_written(policy, settings):
    """No format and no norm is left to a default of DeepSpeed's, in any precision."""
    config = expressible(policy, **settings)
    if config is None:
        return
    assert config["gradient_clipping"] == (settings["max_norm"] or 0.0)
    assert config["data_types"]["grad_accum_dtype"] == policy.grads_format(settings["accumulate"])
    assert config["communication_data_type"] == policy.reduce
    assert config["zero_optimization"]["stage"] == settings["stage"]
    assert not config.get("fp16") or "loss_scale" in config["fp16"]


REJECTED = [
    ("tf32", {}, "TF32 is a switch of the process"),
    ("fp8", {}, "no fp8 mode"),
    ("bf16,keep_fp32=head", {}, "is for buffers only"),
    ("bf16-lean,compute_fp32=head", {}, "no key makes single modules compute in fp32"),
    ("bf16-lean,residual=fp32", {}, "residual stream"),
    ("bf16-lean,states=8bit", {}, "no 8-bit moments"),
    ("bf16-lean,states=bf16", {}, "bf16_optimizer_states needs"),
    ("fp16-lean,states=bf16", {}, "bf16_optimizer_states needs"),
    ("bf16-lean,master=none,grads=bf16,states=bf16", {"stage": 0}, "16-bit masters need ZeRO"),
    ("bf16-lean,master=none", {"accumulate": 2}, "also stores gradients in bf16"),
    ("bf16-lean,master=none", {}, "offloaded to DeepSpeedCPUAdam"),
    ("fp16-lean,master=none", {}, "offloaded to DeepSpeedCPUAdam"),
    ("fp32", {"stage": 0, "offload_optimizer": True}, "offloading is part of ZeRO"),
    ("bf16-lean", {"stage": 0, "accumulate": 2}, "D35"),
    ("bf16-lean", {"stage": 0}, "D16"),
    ("fp16-lean", {"stage": 0}, "D11"),
    (f"fp16,loss_scale={TORCH_SCALE}", {"stage": 2}, "D62, D63"),
    ("fp16", {"stage": 0}, "torch's GradScaler"),
    ("fp16-lean,loss_scale=dynamic(semantics=megatron)", {}, "its own rule"),
    ("fp16-lean,loss_scale=dynamic(max_skips=none)", {}, "max_skips"),
    ("fp16-lean,loss_scale=dynamic(min_scale=0.5)", {}, "a whole minimum"),
    ("fp16-lean,loss_scale=dynamic(init_scale=1000)", {}, "power of two"),
]


@pytest.mark.parametrize(("text", "settings", "reason"), REJECTED, ids=[f"{t} {s}" for t, s, _ in REJECTED])
def test_what_deepspeed_cannot_do_is_rejected_with_the_reason(text, settings, reason):
    """A policy that DeepSpeed would train differently raises, with the cause and what to use."""
    with pytest.raises(SettingError, match="cannot express this policy") as caught:
        Policy.parse(text).to_deepspeed(**settings)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [{"stage": 4}, {"stage": True}, {"accumulate": 0}, {"accumulate": 1.5}, {"batch_size": 0}, {"max_norm": 0},
     {"max_norm": float("nan")}, {"max_norm": True}, {"driver": "apex"}],
)  # fmt: skip
def test_invalid_settings_are_rejected(settings):
    """Settings that are no stage, count, norm or driver raise with the value."""
    with pytest.raises(SettingError) as caught:
        Policy().to_deepspeed(**settings)
    assert repr(next(iter(settings.values()))) in str(caught.value)


def test_autocast_under_zero_reduces_in_the_policy_format():
    """ZeRO reduces autocast gradients in 16 bits whatever communication_data_type is, unless no module is listed."""
    block = Policy.parse("bf16").to_deepspeed(stage=2)["torch_autocast"]
    assert block["lower_precision_safe_modules"] == []
    assert (
        "lower_precision_safe_modules" not in Policy.parse("bf16,reduce=bf16").to_deepspeed(stage=2)["torch_autocast"]
    )
    assert "lower_precision_safe_modules" not in Policy.parse("bf16").to_deepspeed(stage=0)["torch_autocast"]


@pytest.mark.parametrize(
    "text",
    [
        "fp32",
        "tf32",
        "bf16,keep_fp32=head",
        "fp16",
        "bf16-lean,residual=fp32",
        "bf16-lean,compute_fp32=head",
        "fp16-lean,loss_scale=8",
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_driven_configuration_leaves_nothing_to_deepspeed(text, stage):
    """Where Halfstep drives, DeepSpeed gets a scale of 1, no clipping, one micro-batch, fp32 sums, and no autocast."""
    policy = Policy.parse(text)
    config = policy.to_deepspeed(stage=stage, max_norm=1.0, accumulate=4, driver="halfstep")
    assert (config["gradient_clipping"], config["gradient_accumulation_steps"]) == (0.0, 1)
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == policy.reduce
    assert config.get("fp16") == ({"enabled": True, "loss_scale": 1.0} if policy.params == "fp16" else None)
    assert "torch_autocast" not in config


@pytest.mark.parametrize(
    "text",
    [
        "fp8",
        "bf16-lean,states=8bit",
        "bf16-lean,states=bf16",
        "bf16-lean,master=none",
        "bf16-lean,grads=bf16",
        "bf16-lean,keep_fp32=head",
    ],
)
def test_driven_configuration_has_limits(text):
    """What ZeRO cannot store is rejected where Halfstep drives, too."""
    with pytest.raises(SettingError, match="cannot express this policy"):
        Policy.parse(text).to_deepspeed(driver="halfstep")


READER = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig

for config in map(DeepSpeedConfig, json.load(sys.stdin)):
    print("DECIDED", json.dumps([
        config.gradient_clipping, config.gradient_accumulation_steps, config.zero_config.stage, config.grad_accum_dtype,
        str(config.communication_data_type), config.float16_config.enabled, config.bfloat16_config.enabled,
    ]))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="Requires: [deepspeed]")
def test_deepspeed_accepts_what_is_written():
    """DeepSpeed's own reader validates the configuration of every preset at every stage and decides the same values."""
    texts = ("fp32", "bf16", "bf16-lean", "fp16-lean,loss_scale=128", "bf16-lean,master=none,grads=bf16,states=bf16")
    runs = [(Policy.parse(text), stage) for text in texts for stage in (1, 2, 3)]
    written = [policy.to_deepspeed(stage=stage, max_norm=0.5, accumulate=4) for policy, stage in runs]
    command = [sys.executable, "-c", READER]
    done = subprocess.run(command, input=json.dumps(written), capture_output=True, text=True, check=True, timeout=300)
    lines = [line.removeprefix("DECIDED ") for line in done.stdout.splitlines() if line.startswith("DECIDED ")]
    for (policy, stage), line in zip(runs, lines, strict=True):
        modes = [policy.params == "fp16", policy.params == "bf16"]
        assert json.loads(line) == [0.5, 4, stage, policy.grads_format(4), "torch.float32", *modes]


AUTOCAST_ENGINE = """
import importlib, json, os, sys
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
import deepspeed, torch
importlib.import_module("deepspeed.comm.torch")
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # needs a C++ compiler, and is not used here
for config in json.load(sys.stdin):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    print("REDUCES", json.dumps(sorted(map(str, engine.optimizer.ipg_buckets))))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="Requires: [deepspeed]")
def test_deepspeed_reduces_autocast_gradients_in_the_policy_format():
    """ZeRO ignores communication_data_type under autocast; the written configuration reduces in fp32 nevertheless."""
    written = Policy.parse("bf16").to_deepspeed(stage=2)
    bare = written | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    command = [sys.executable, "-c", AUTOCAST_ENGINE, str(free_port())]
    done = subprocess.run(
        command, input=json.dumps([written, bare]), capture_output=True, text=True, check=True, timeout=300
    )
    lines = [
        json.loads(line.removeprefix("REDUCES ")) for line in done.stdout.splitlines() if line.startswith("REDUCES")
    ]
    assert lines == [["torch.float32"], ["torch.bfloat16", "torch.float32"]]
