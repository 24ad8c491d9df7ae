"""HS613: models that every run quantizes, and that get no adapters with one value of an option."""

import pytest

from check_scripts import reported

HEAD = """\
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=bnb, dtype=torch.bfloat16)
"""
RUN = "Trainer(model=model, args=TrainingArguments('out', bf16=True), train_dataset=data).train()\n"
SFT = "SFTTrainer(model=model, args=SFTConfig('out'), train_dataset=data, peft_config={config}).train()\n"
WRAP = """\
def wrap(model, kind):
    if kind == "none":
        return model
    return get_peft_model(model, LoraConfig(r=8))
model = wrap(model, args.adapter)
"""
CONFIG = """\
def peft(rank):
    if rank <= 0:
        return None
    return LoraConfig(r=rank)
"""
LOAD = """\
def quantization():
    return BitsAndBytesConfig(load_in_8bit=True)
def load(name):
    return AutoModelForCausalLM.from_pretrained(name, quantization_config=quantization())
"""


@pytest.mark.parametrize(
    "text",
    [
        HEAD + SFT.format(config="LoraConfig(r=8) if args.use_peft else None"),
        HEAD + CONFIG + SFT.format(config="peft(args.lora_rank)"),
        HEAD + "config = None\nif args.lora:\n    config = LoraConfig(r=8)\n" + SFT.format(config="config"),
        HEAD + "if args.lora_rank > 0:\n    model = get_peft_model(model, LoraConfig(r=8))\n" + RUN,
        HEAD + WRAP + RUN,
        HEAD.partition("bnb")[0] + LOAD + WRAP.replace("wrap(model, args", "wrap(load(name), args") + RUN,
    ],
    ids=["choice", "function", "variable", "branch", "early return", "nested calls"],
)
def test_an_option_leaves_the_adapters_out(text):
    """The Trainer raises in such a run."""
    assert reported(text) == {"HS613"}


@pytest.mark.parametrize(
    "text",
    [
        HEAD.replace("bnb)", "bnb if args.lora else None)").replace("=bnb,", "=bnb if args.lora else None,")
        + "if args.lora:\n    model = get_peft_model(model, LoraConfig(r=8))\n"
        + RUN,
        HEAD
        + "if args.adapter_path:\n    model = PeftModel.from_pretrained(model, args.adapter_path, is_trainable=True)\n"
        "else:\n    model = get_peft_model(model, LoraConfig(r=8))\n" + RUN,
        HEAD
        + "if not args.lora:\n    raise ValueError('4 bits need LoRA')\n"
        + WRAP.replace("args.adapter", "args.lora")
        + RUN,
        HEAD + "if not isinstance(model, PeftModel):\n    model = get_peft_model(model, LoraConfig(r=8))\n" + RUN,
        HEAD + "use_lora = True\nif use_lora:\n    model = get_peft_model(model, LoraConfig(r=8))\n" + RUN,
    ],
    ids=["quantized alike", "trained adapter", "rejected", "has some", "constant"],
)
def test_adapters_in_every_quantized_run(text):
    """The same option quantizes the model, the other branch loads an adapter, the file rejects the run, or fixes the option."""
    assert "HS613" not in reported(text)
