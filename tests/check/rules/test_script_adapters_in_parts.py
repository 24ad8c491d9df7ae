"""Adapters that only some runs have: their configuration in a dictionary that a function returns, or Unsloth as an option."""

import pytest

from check_scripts import findings

SCRIPT = """\
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, HfArgumentParser, TrainingArguments
from trl import SFTTrainer
from unsloth import FastLanguageModel

def plain(opts, args):
    dtype = torch.float16 if args.fp16 else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(opts.name, torch_dtype=dtype)
    {config}
    return {{"model": model, "adapter": config}}

def load_unsloth_model(opts, args):
    model, _ = FastLanguageModel.from_pretrained(opts.name, load_in_4bit=True if opts.mode == 'qlora' else False)
    if opts.mode in ["lora", "qlora"]:
        model = FastLanguageModel.get_peft_model(model, r=8)
    return {{"model": model, "adapter": None}}

def main():
    opts, args = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
    if opts.use_unsloth:
        parts = load_unsloth_model(opts, args)
    else:
        parts = plain(opts, args)
    model = parts["model"]
    adapter = parts["adapter"]
    SFTTrainer(model=model, args=args, peft_config=adapter).train()
"""


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("config = LoraConfig(r=8) if opts.mode == 'lora' else None", True),
        ("config = None\n    if opts.mode == 'lora':\n        config = LoraConfig(r=8)", True),
        ("config = None\n    model = get_peft_model(model, LoraConfig(r=8))", False),
    ],
)
def test_a_run_without_adapters_trains_the_weights(config, expected):
    """The run of full fine-tuning loads float16 weights where fp16 is on; one that always has adapters does not train them."""
    assert bool(findings(SCRIPT.format(config=config), "HS166")) == expected
