"""HS166 and HS277: 16-bit weights of Trainers whose fp16, bf16 and DeepSpeed the command line or the device decides."""

import pytest

from check_scripts import findings

LOAD = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype={dtype})
Trainer(model=model, args=TrainingArguments("out", fp16={flag})).train()
"""
GPU = "torch.cuda.is_available()"


def codes(text):
    return sorted(f.code for f in findings(text, "HS166", "HS277"))


@pytest.mark.parametrize(
    ("dtype", "flag"),
    [
        ("torch.bfloat16", "True"),
        ("torch.bfloat16", GPU),
        (f"torch.bfloat16 if {GPU} else torch.float32", "True"),
        (f"torch.bfloat16 if {GPU} else torch.float32", GPU),
        ("torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16", "True"),
        ("torch.bfloat16 if args.half else torch.float32", "args.half"),
    ],
)
def test_bfloat16_weights_under_fp16_are_reported_once(dtype, flag):
    """The scaler rejects their gradients in the first step, so that no update is ever lost."""
    assert "HS166" in codes(LOAD.format(dtype=dtype, flag=flag))
    assert "HS277" not in codes(LOAD.format(dtype=dtype, flag=flag)) or flag == "args.half"


@pytest.mark.parametrize(
    ("dtype", "flag"),
    [
        ("torch.bfloat16 if args.bf16 else torch.float32", "not args.bf16"),
        ("torch.float32 if args.fp16 else torch.bfloat16", "args.fp16"),
        (f"torch.float32 if {GPU} else torch.bfloat16", GPU),
        ("torch.bfloat16 if args.bf16 else torch.float32", "args.fp16"),
        ("torch.bfloat16", "False"),
    ],
)
def test_bfloat16_weights_of_other_runs_are_no_error(dtype, flag):
    """One of two formats is chosen, or nothing is scaled."""
    assert "HS166" not in codes(LOAD.format(dtype=dtype, flag=flag))


PARSED = """\
import torch
from dataclasses import dataclass, field
from peft import get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, Trainer, TrainingArguments

@dataclass
class Arguments(TrainingArguments):
    {field}

options, args = HfArgumentParser((Options, Arguments)).parse_args_into_dataclasses()
if options.use_qlora:
    kwargs = {{"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}}
else:
    kwargs = {{"torch_dtype": {dtype}}}
model = AutoModelForCausalLM.from_pretrained(name, **kwargs)
if options.use_qlora:
    model = get_peft_model(prepare_model_for_kbit_training(model), config)
    {part}
Trainer(model=model, args=args).train()
"""
CHOICE = "torch.bfloat16 if args.bf16 else torch.float16"
OFF = "deepspeed: str = field(default=None)"


@pytest.mark.parametrize(
    ("setting", "dtype", "expected"),
    [
        (OFF, CHOICE, ["HS166", "HS277"]),
        ("rank: int = 4", CHOICE, ["HS166", "HS277"]),
        ("deepspeed: str = field(default='zero2.json')", CHOICE, []),
        ("fsdp: str = field(default='full_shard')", CHOICE, []),
        (OFF, "torch.bfloat16 if args.bf16 else torch.float32", ["HS277"]),
        (OFF, "torch.float32", []),
    ],
)
def test_fp16_of_the_command_line_excludes_bf16(setting, dtype, expected):
    """With --fp16 the other arm loads float16 weights, which the scaler rejects unless DeepSpeed is the default."""
    assert codes(PARSED.format(field=setting, dtype=dtype, part="pass")) == expected


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (f"model.base.lm_head.requires_grad_(True)\n    model.base.lm_head.to({CHOICE})", ["HS166", "HS277"]),
        (
            f"head = model.base.lm_head\n    head.requires_grad_(True)\n    head.to({CHOICE})",
            ["HS166", "HS277"],
        ),
        ("model.base.lm_head.requires_grad_(True)\n    model.base.lm_head.bfloat16()", ["HS277"]),
        ("model.base.lm_head.requires_grad_(True)\n    model.base.lm_head.float()", []),
        ("model.base.lm_head.requires_grad_(True)\n    model.base.norm.bfloat16()", []),
        ("model.base.lm_head.bfloat16()", []),
        ("model.base.lm_head.requires_grad_(False)\n    model.base.lm_head.bfloat16()", []),
    ],
)
def test_a_layer_that_is_trained_next_to_adapters_and_cast_is_reported(part, expected):
    """`prepare_model_for_kbit_training` made it float32; frozen layers may have any dtype."""
    assert codes(PARSED.format(field=OFF, dtype="torch.float32", part=part)) == expected
