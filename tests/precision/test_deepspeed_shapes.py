"""DeepSpeed configurations in the shapes that people use: accepted with which decisions and notes, or rejected with which words.

The files are written for this test in the shape of public ones: DeepSpeed's tutorials, Transformers, Accelerate,
LLaMA-Factory, Megatron-DeepSpeed, GPT-NeoX, Lightning and what people paste into issues.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec

import pytest

from halfstep.check.deepspeed import merge_deepspeed
from halfstep.errors import SettingError
from halfstep.precision.policy import Policy

ADAMW = "torch.optim.adamw.AdamW"
# What a program like `halfstep train` knows: precision, norm, window and an optimizer of its own.
PROGRAM = {"policy": Policy.parse("bf16-lean"), "max_norm": 1.0, "accumulate": 4, "batch_size": 8, "optimizer": ADAMW}
OWN = {"optimizer": ADAMW}
DRIVEN = {"driver": "halfstep"}


@dataclass(frozen=True)
class Accepted:
    """What an accepted configuration becomes."""

    policy: str
    stage: int
    decided: dict = field(default_factory=dict)  # key -> the value in this run, None if removed
    notes: tuple = ()  # parts of notes
    kept: dict = field(default_factory=dict)  # top-level keys that reach DeepSpeed as they are
    norm: float | None = 1.0
    accumulate: int = 1


def hf(stage, **more):
    """The shape of Transformers' examples: everything that the Trainer knows is auto."""
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= {
            "sub_group_size": 1e9, "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
        }  # fmt: skip
    scale = {
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }
    return {
        "fp16": {"enabled": "auto", **scale},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}},
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    } | more


def plain(stage=2, **more):
    """A complete configuration without anything to decide but what `more` adds."""
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    return config | {"zero_optimization": {"stage": stage}} | more


BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
BF16_FP32 = BF16 | {"communication_data_type": "fp32"}

SHAPES = {
    # Transformers, TRL
    "hf zero-2 auto": (hf(2), PROGRAM, Accepted(
        "bf16-lean", 2, accumulate=4, kept={"steps_per_print": 2000, "wall_clock_breakdown": False}, decided={
            "bf16.enabled": True, "fp16.enabled": False, "gradient_clipping": 1.0, "gradient_accumulation_steps": 4,
            "train_batch_size": None, "train_micro_batch_size_per_gpu": 8, "zero_optimization.reduce_bucket_size": None,
            "optimizer.type": ADAMW, "scheduler.type": None, "data_types.grad_accum_dtype": "fp32",
            "communication_data_type": "fp32",
        })),
    "hf zero-3 auto": (hf(3), PROGRAM, Accepted(
        "bf16-lean", 3, accumulate=4, decided={"zero_optimization.stage3_prefetch_bucket_size": None})),
    "hf zero-3 with offload": (hf(3, zero_optimization={
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu"}}),
        PROGRAM, Accepted("bf16-lean", 3, accumulate=4, decided={"zero_force_ds_cpu_optimizer": False})),
    "hf auto, nothing decided": (hf(2), {}, "gradient_accumulation_steps='auto'"),
    "hf auto, precision not decided": (hf(2), {"accumulate": 1, "max_norm": None, **OWN}, "fp16.enabled='auto'"),
    "hf auto, norm not decided": (hf(2), {"accumulate": 1, "policy": Policy(), **OWN}, "gradient_clipping='auto'"),
    "hf auto, optimizer not passed": (hf(2), PROGRAM | {"optimizer": None}, "optimizer.params.lr='auto'"),
    "hf auto stage": (hf(2, zero_optimization={"stage": "auto"}), PROGRAM, "zero_optimization.stage='auto'"),
    "hf auto offload device": (hf(3, zero_optimization={"stage": 3, "offload_optimizer": {"device": "auto"}}), PROGRAM,
        "zero_optimization.offload_optimizer.device='auto'"),
    # Accelerate
    "accelerate fp16 auto": (
        {"fp16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
         "gradient_clipping": "auto", "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}},
        PROGRAM | {"policy": Policy.parse("fp16-lean")},
        Accepted("fp16-lean", 2, accumulate=4, decided={"fp16.enabled": True})),
    "accelerate dump of a plugin": (
        plain(3, **BF16_FP32, fp16={"enabled": False}, steps_per_print=float("inf"), zero_allow_untested_optimizer=True),
        OWN, Accepted("bf16-lean", 3)),
    # LLaMA-Factory, ms-swift
    "llamafactory z0": (hf(0, zero_allow_untested_optimizer=True), PROGRAM, "D35"),
    "llamafactory z2": (hf(2, zero_allow_untested_optimizer=True), PROGRAM, Accepted("bf16-lean", 2, accumulate=4)),
    "llamafactory z3 with an optimizer of its own": (
        hf(3, zero_allow_untested_optimizer=True), PROGRAM | {"optimizer": "galore_torch.GaLoreAdamW"},
        Accepted("bf16-lean", 3, accumulate=4, notes=("compare a short run with stage 0",))),
    # DeepSpeed's tutorials
    "tutorial fp16 adam": (
        {"train_batch_size": 16, "steps_per_print": 2000, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1},
         "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999]}},
         "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000}}, **FP16},
        {}, Accepted("fp16-lean", 1, decided={"communication_data_type": "fp32", "train_batch_size": None},
                     kept={"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000}}})),
    "tutorial fp16 without zero": (plain(0, **FP16), OWN, "D11"),
    "tutorial bf16 without zero": (plain(0, **BF16), OWN, "D16"),
    "tutorial fp32": (plain(0), OWN, Accepted("fp32", 0)),
    "no zero block": ({"train_batch_size": 8}, OWN, Accepted("fp32", 0, decided={"gradient_clipping": 1.0})),
    "first form of zero": (plain(zero_optimization=True, **BF16_FP32), OWN, Accepted(
        "bf16-lean", 1, decided={"zero_optimization.stage": 1})),
    "zero-infinity on nvme": (
        plain(3, **BF16_FP32, aio={"block_size": 262144}, zero_optimization={"stage": 3, "offload_param": {
            "device": "nvme", "nvme_path": "/local", "buffer_count": 5}}),
        OWN, Accepted("bf16-lean", 3, kept={"aio": {"block_size": 262144}})),
    "zero++": (
        plain(3, **BF16_FP32, zero_optimization={"stage": 3, "zero_quantized_gradients": True, "zero_hpz_partition_size": 8}),
        OWN, Accepted("bf16-lean", 3, notes=("ZeRO++ quantizes",))),
    "comments and trailing commas": (
        '{\n  // batch\n  "train_micro_batch_size_per_gpu": 4, # per GPU\n  "bf16": {"enabled": true,},\n'
        '  "zero_optimization": {"stage": 2}, /* gradients too */\n  "gradient_clipping": 0.5,\n}',
        OWN, Accepted("bf16-lean", 2, norm=0.5)),
    "comment keys": (plain(**BF16_FP32, _comment="tuned for 8 GPUs"), OWN, Accepted(
        "bf16-lean", 2, decided={"_comment": None})),
    "old name bfloat16": (plain(bfloat16={"enabled": True}), OWN, Accepted("bf16-lean", 2)),
    "text as a switch": (plain(bf16={"enabled": "true"}), OWN, Accepted("bf16-lean", 2)),
    "scale starts at 2^32": (plain(fp16={"enabled": True, "initial_scale_power": 32}), OWN, Accepted(
        "fp16-lean,loss_scale=dynamic(init_scale=16777216)", 2, decided={"fp16.initial_scale_power": 24})),
    "static scale": (plain(fp16={"enabled": True, "loss_scale": 128}), OWN, Accepted("fp16-lean,loss_scale=128", 2)),
    "bf16 without the overflow check": (
        plain(bf16={"enabled": True, "check_grad_overflow": False}), OWN,
        Accepted("bf16-lean", 2, decided={"bf16.check_grad_overflow": None})),
    "16-bit accumulation on purpose": (
        plain(gradient_accumulation_steps=8, data_types={"grad_accum_dtype": "bf16"}, **BF16), OWN,
        Accepted("bf16-lean,grads=bf16", 2, accumulate=8)),
    "accumulation by omission": (plain(gradient_accumulation_steps=8, **BF16), OWN, Accepted(
        "bf16-lean", 2, accumulate=8, decided={"data_types.grad_accum_dtype": "fp32"})),
    "autocast bf16": (plain(torch_autocast={"enabled": True, "dtype": "bfloat16"}), OWN, Accepted(
        "bf16", 2, decided={"torch_autocast.lower_precision_safe_modules": []})),
    "autocast fp16 with zero": (plain(torch_autocast={"enabled": True, "dtype": "float16"}), OWN, "D62, D63"),
    "autocast without a dtype": (plain(torch_autocast={"enabled": True}), OWN, "HS203"),
    "precision of the program wins": (plain(**FP16), PROGRAM, Accepted(
        "bf16-lean", 2, accumulate=4, decided={"fp16.enabled": False, "bf16.enabled": True})),
    "clipping only in the optimizer": (
        {"train_batch_size": 8, "zero_optimization": {"stage": 1},
         "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "max_grad_norm": 0.3}}},
        {}, Accepted("fp32", 1, norm=0.3, decided={"optimizer.params.max_grad_norm": None},
                     kept={"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}})),
    "clipping in both places": (
        plain(optimizer={"type": "AdamW", "params": {"max_grad_norm": 0.3}}), {},
        Accepted("fp32", 2, decided={"optimizer.params.max_grad_norm": None})),
    "batch sizes leave the window open": (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}, **BF16},
        OWN, "leave the number of micro-batches to the number of ranks"),
    "batch sizes on known ranks": (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}, **BF16},
        OWN | {"world_size": 8}, Accepted("bf16-lean", 1, accumulate=2)),
    "batch sizes that do not divide": (
        {"train_batch_size": 60, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}},
        OWN | {"world_size": 8}, "it is not a multiple of 32"),
    # Removed features
    "amp disabled": (plain(amp={"enabled": False}), OWN, Accepted("fp32", 2, decided={"amp": None})),
    "amp O2": (plain(0, amp={"enabled": True, "opt_level": "O2"}), OWN, "use precision='fp16-lean'"),
    "amp with zero": (plain(2, amp={"enabled": True, "opt_level": "O1"}), OWN, "DeepSpeed 0.19.8 removed Apex AMP"),
    "1-bit adam": (plain(0, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 400}}, **FP16), {},
        "DeepSpeed 0.19.7 removed OneBitAdam"),
    "0/1 adam with zero": (plain(2, optimizer={"type": "ZeroOneAdam", "params": {"lr": 1e-3}}, **FP16), {}, "run without ZeRO only"),
    "1-bit lamb, but the program has its own": (
        plain(1, optimizer={"type": "OneBitLamb", "params": {"lr": 1e-3}}, **BF16_FP32), OWN,
        Accepted("bf16-lean", 1, decided={"optimizer.type": ADAMW}, notes=("DeepSpeed 0.19.7 removed OneBitLamb",))),
    "old switches that are off": (
        plain(**BF16_FP32, sparse_gradients=False, elasticity={"enabled": False}), OWN,
        Accepted("bf16-lean", 2, decided={"sparse_gradients": None, "elasticity": None})),
    "curriculum learning": (plain(curriculum_learning={"enabled": True}), OWN, "HS256"),
    "quantization-aware training": (plain(compression_training={"weight_quantization": {}}), OWN, "HS256"),
    # Untested optimizers
    "sgd without the flag": (plain(optimizer={"type": "SGD", "params": {"lr": 0.1}}), {}, "zero_allow_untested_optimizer"),
    "sgd object without the flag": (plain(), {"optimizer": "torch.optim.sgd.SGD"}, "zero_allow_untested_optimizer"),
    "sgd with the flag": (
        plain(optimizer={"type": "SGD", "params": {"lr": 0.1}}, zero_allow_untested_optimizer=True), {},
        Accepted("fp32", 2, notes=("treats every element alone",))),
    "lamb with the flag": (
        plain(optimizer={"type": "Lamb", "params": {"lr": 0.1}}, zero_allow_untested_optimizer=True), {},
        Accepted("fp32", 2, notes=("Lamb needs whole layers",))),
    # What else is public
    "zenflow": (
        plain(2, **BF16_FP32, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {
            "topk_ratio": 0.1, "update_interval": 2}}, optimizer={"type": "AdamW", "params": {"lr": 2e-5}}),
        {}, Accepted("bf16-lean", 2)),
    "beit: adam_w_mode outside params": (
        {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 32, "steps_per_print": 1000, "zero_optimization": {"stage": 1},
         "optimizer": {"type": "Adam", "adam_w_mode": True, "params": {"lr": 1e-3, "bias_correction": True}},
         "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 7, "loss_scale_window": 128}},
        {"world_size": 8}, "HS253"),
    "beit: the program has its own optimizer": (
        {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 32, "zero_optimization": {"stage": 1},
         "optimizer": {"type": "Adam", "adam_w_mode": True, "params": {"lr": 1e-3}},
         "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 7, "loss_scale_window": 128}},
        OWN | {"world_size": 8}, Accepted("fp16-lean,loss_scale=dynamic(init_scale=128;growth_interval=128)", 1)),
    "key of a launcher": (plain(**BF16_FP32, distributed_backend="nccl"), OWN, Accepted(
        "bf16-lean", 2, decided={"distributed_backend": None})),
    "typo in data_types": (plain(data_types={"params_dtype": "fp32"}), PROGRAM, "Did you mean 'param_dtype'"),
    "python dictionary with tuples": (
        plain(optimizer={"type": "AdamW", "params": {"lr": 1e-4, "betas": (0.9, 0.95)}}), {}, Accepted("fp32", 2)),
    "shell template": ('{\n "train_micro_batch_size_per_gpu": 1,\n "zero_optimization": {"stage": $ZERO_STAGE}\n}', OWN,
        "zero_optimization.stage='$ZERO_STAGE'"),
    # Megatron-DeepSpeed, GPT-NeoX
    "megatron template": ('{\n "train_batch_size": CONFIG_BATCH_SIZE,\n "zero_optimization": {"stage": 1}\n}', OWN,
        "train_batch_size='CONFIG_BATCH_SIZE'"),
    "megatron rendered": (
        {"train_batch_size": 512, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 16, "steps_per_print": 10,
         "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
         "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        OWN, Accepted("bf16-lean", 1, accumulate=16)),
    "neox fp16 block": (plain(fp16={"fp16": True, "enabled": True, "loss_scale": 0}), OWN, "HS251"),
    "neox top level": (
        plain(pipe_parallel_size=1, hidden_size=768, fp16={"enabled": True, "hysteresis": 2}), OWN,
        Accepted("fp16-lean", 2, decided={"pipe_parallel_size": None, "hidden_size": None})),
    # Under Halfstep's own backend, which scales, clips, accumulates and casts
    "driven: fp16 without zero": (plain(0, **FP16), OWN | DRIVEN, Accepted("fp16-lean", 0, decided={"fp16.loss_scale": 1.0})),
    "driven: llamafactory z0": (hf(0, zero_allow_untested_optimizer=True), PROGRAM | DRIVEN, Accepted(
        "bf16-lean", 0, accumulate=4, decided={"gradient_clipping": 0.0, "gradient_accumulation_steps": 1})),
    "driven: autocast fp16 with zero": (
        plain(torch_autocast={"enabled": True, "dtype": "float16"}), OWN | DRIVEN,
        Accepted("fp16,loss_scale=dynamic(semantics=torch;growth_interval=2000)", 2, decided={"torch_autocast.enabled": False})),
    "driven: sgd without the flag": (plain(), {"optimizer": "torch.optim.sgd.SGD"} | DRIVEN, Accepted(
        "fp32", 2, decided={"zero_allow_untested_optimizer": True})),
    "driven: muon without the flag": (plain(), {"optimizer": "torch.optim._muon.Muon"} | DRIVEN, "needs whole layers"),
    "driven: 16-bit masters": (
        plain(bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}), OWN | DRIVEN,
        "optimizer states are fp32"),
    # Mistakes
    "typo at the top level": (plain(gradient_cliping=1.0), OWN, "HS252"),
    "typo in a block": (plain(fp16={"enabled": True, "loss_scale_windows": 500}), OWN, "HS251"),
    "setting in the wrong place": (plain(offload_optimizer={"device": "cpu"}), OWN, "HS253"),
    "two modes": (plain(**BF16, **FP16), OWN, "HS201"),
    "hysteresis of 0": (plain(fp16={"enabled": True, "hysteresis": 0}), OWN, "HS213"),
    "bf16 reduced in fp16": (plain(**BF16, communication_data_type="fp16"), OWN, "HS222"),
    "block without a switch": (plain(fp16={"loss_scale": 0}), OWN, Accepted("fp32", 2, notes=("HS210",))),
    "number as text": (plain(gradient_clipping="1.0"), OWN, "HS255"),
    "switch instead of a block": (plain(fp16=True), OWN, "HS258"),
    "stage 4": (plain(4), OWN, "HS237"),
    "summed gradients": (plain(1, gradient_allreduce_op="sum"), OWN, "gradient_allreduce_op"),
    "not a configuration": ("\n[1, 2]", OWN, "JSON object"),
    "duplicate key": ('{"bf16": {"enabled": true}, "bf16": {"enabled": false}}', OWN, "appears twice"),
}  # fmt: skip


def test_there_are_enough_shapes():
    """The table covers acceptance and rejection broadly."""
    accepted = sum(isinstance(outcome, Accepted) for _, _, outcome in SHAPES.values())
    assert accepted >= 25
    assert len(SHAPES) - accepted >= 25


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if isinstance(shape[2], Accepted)])
def test_shape_is_accepted(name):
    """An accepted configuration gives this policy, stage, norm and window, these decisions and these notes."""
    config, choices, outcome = SHAPES[name]
    merged = merge_deepspeed(config, **choices)
    assert merged.policy == Policy.parse(outcome.policy)
    assert (merged.stage, merged.max_norm, merged.accumulate) == (outcome.stage, outcome.norm, outcome.accumulate)
    decided = {decision.key: decision.ours for decision in merged.decisions}
    assert {key: decided.get(key, "not decided") for key in outcome.decided} == outcome.decided
    assert not [part for part in outcome.notes if not any(part in note for note in merged.notes)]
    assert bool(merged.notes) == bool(outcome.notes), merged.notes
    assert {key: merged.config.get(key) for key in outcome.kept} == outcome.kept
    assert '"auto"' not in json.dumps(merged.config)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if isinstance(shape[2], str)])
def test_shape_is_rejected(name):
    """A configuration that cannot be used is rejected with the key or rule and the reason."""
    config, choices, words = SHAPES[name]
    with pytest.raises(SettingError) as caught:
        merge_deepspeed(config, **choices)
    assert words in str(caught.value)


READER = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig

for name, config in json.load(sys.stdin).items():
    try:
        DeepSpeedConfig(config)
    except Exception as error:
        print("REJECTED", name, type(error).__name__, error)
print("READ ALL")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="Requires: [deepspeed]")
def test_deepspeed_reads_every_accepted_shape():
    """DeepSpeed's own reader accepts every configuration that Halfstep passes to it."""
    accepted = {name: shape for name, shape in SHAPES.items() if isinstance(shape[2], Accepted)}
    configs = {name: merge_deepspeed(config, **choices).config for name, (config, choices, _) in accepted.items()}
    command = [sys.executable, "-c", READER]
    done = subprocess.run(command, input=json.dumps(configs), capture_output=True, text=True, check=True, timeout=300)
    assert "READ ALL" in done.stdout
    assert not [line for line in done.stdout.splitlines() if line.startswith("REJECTED")]
