"""HS613: models that one option quantizes, and that get adapters only if another asks for them."""

import pytest

from check_scripts import findings

CODE = """\
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, Trainer, TrainingArguments

args, own = HfArgumentParser((TrainingArguments, ModelArguments)).parse_args_into_dataclasses()
config = None
{config}
model = AutoModelForCausalLM.from_pretrained(own.name, {load})
{adapt}
Trainer(model=model, args=args, train_dataset=data).train()
"""
ADAPT = "if own.use_lora:\n    model = get_peft_model(model, LoraConfig(r=8))"
PASSED = "quantization_config=config"
BRANCH = "if own.{name}:\n    config = {value}"


@pytest.mark.parametrize(
    ("config", "load"),
    [
        ("", "load_in_8bit=own.load_in_8bit"),
        ("", "load_in_4bit=own.use_4bit, device_map='auto'"),
        (BRANCH.format(name="load_in_4bit", value="BitsAndBytesConfig(load_in_4bit=True)"), PASSED),
        (BRANCH.format(name="load_in_8bit", value="{'load_in_8bit': True}"), PASSED),
        (BRANCH.format(name="quantize", value="dict(load_in_4bit=True)"), PASSED),
        ("config = BitsAndBytesConfig(load_in_4bit=True) if own.quantize else None", PASSED),
    ],
)
def test_two_options_that_exclude_each_other(config, load):
    """Nothing rejects the quantized model without adapters before the Trainer does."""
    found = findings(CODE.format(config=config, load=load, adapt=ADAPT), "HS613")
    assert [f.severity for f in found] == ["warning"]
    assert "not `own.use_lora`" in found[0].message


@pytest.mark.parametrize(
    ("config", "load", "adapt"),
    [
        ("", "load_in_8bit=own.load_in_8bit", "model = get_peft_model(model, LoraConfig(r=8))"),
        ("", "load_in_8bit=own.load_in_8bit", ADAPT.replace("own.use_lora", "own.load_in_8bit")),
        ("own.use_lora = own.use_lora or own.load_in_8bit", "load_in_8bit=own.load_in_8bit", ADAPT),
        ("if own.load_in_8bit and not own.use_lora:\n    raise ValueError", "load_in_8bit=own.load_in_8bit", ADAPT),
        ("if own.use_lora:\n    config = BitsAndBytesConfig(load_in_4bit=True)", PASSED, ADAPT),
        ("if own.use_lora and own.quantize:\n    config = BitsAndBytesConfig(load_in_4bit=True)", PASSED, ADAPT),
        (
            "if own.use_lora:\n    if own.quantize:\n        config = BitsAndBytesConfig(load_in_4bit=True)",
            PASSED,
            ADAPT,
        ),
        ("", "load_in_8bit=False", ADAPT),
    ],
)
def test_quantization_that_needs_adapters(config, load, adapt):
    """One option for both, or a check of both, leaves no run with a quantized model and no adapters."""
    assert not findings(CODE.format(config=config, load=load, adapt=adapt), "HS613")
