"""The options with which a Trainer of TRL loads a model, `model_init_kwargs`: passed, in a variable, or assigned to its arguments."""

import pytest

from check_scripts import reported

HEAD = """\
import torch
from transformers import BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
"""
PASSED = "args = SFTConfig('out', bf16=True, learning_rate=1e-6, model_init_kwargs={options})\n"
VARIABLE = "options = {options}\nargs = SFTConfig('out', bf16=True, model_init_kwargs=options)\n"
ASSIGNED = "args = GRPOConfig('out', bf16=True)\nargs.model_init_kwargs = {options}\n"
RUN = "SFTTrainer('Qwen/Qwen2.5-0.5B', args=args, train_dataset=data).train()\n"
BITS = "{'quantization_config': BitsAndBytesConfig(load_in_8bit=True)}"


@pytest.mark.parametrize("form", [PASSED, VARIABLE, ASSIGNED], ids=["passed", "variable", "assigned"])
def test_the_dtype_and_the_quantization_are_read(form):
    """bfloat16 weights without a float32 copy, 8-bit weights without adapters, and float32 weights."""
    assert reported(HEAD + form.format(options="{'dtype': torch.bfloat16}") + RUN) == {"HS277"}
    assert reported(HEAD + form.format(options=BITS) + RUN) == {"HS613"}
    assert reported(HEAD + form.format(options="{'dtype': torch.float32}") + RUN) == set()


@pytest.mark.parametrize("form", [PASSED, VARIABLE, ASSIGNED], ids=["passed", "variable", "assigned"])
def test_quantized_models_with_adapters(form):
    """The Trainer attaches them."""
    run = RUN.replace("train_dataset", "peft_config=LoraConfig(r=8), train_dataset")
    assert reported(HEAD + "from peft import LoraConfig\n" + form.format(options=BITS) + run) == set()
