"""HS277 on models that Unsloth loads without quantization, in scripts that attach no adapter."""

import pytest

from check_scripts import findings

TRAIN = """\
import torch
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained({name}, dtype={dtype}, load_in_4bit={four})
{attach}
trainer = SFTTrainer(model=model, args=SFTConfig("out", bf16=True), train_dataset=data{more})
trainer.train()
"""
CASE = {"name": '"some-lab/model-1b"', "dtype": "None", "four": "False", "attach": "", "more": ""}


@pytest.mark.parametrize("dtype", ["None", "torch.bfloat16"])
def test_all_weights_are_trained_in_bfloat16(dtype):
    """HS277 at the load: Unsloth chooses bfloat16 for None, and nothing is frozen without an adapter."""
    assert [f.line for f in findings(TRAIN.format(**CASE | {"dtype": dtype}), "HS277")] == [4]


@pytest.mark.parametrize(
    "changes",
    [
        {"four": "True"},
        {"four": "options.four"},
        {"dtype": "torch.float32"},
        {"name": "path"},  # perhaps the folder of an adapter
        {"name": '"some-lab/model-1b-lora"'},
        {"attach": "model = FastLanguageModel.get_peft_model(model, r=16)"},
        {"attach": "from peft import LoraConfig", "more": ", peft_config=LoraConfig()"},
        {"four": "False, full_finetuning=True, float32_mixed_precision=True"},
    ],
)
def test_loads_for_adapters_or_in_float32(changes):
    """No finding where the weights are quantized, frozen under an adapter or float32."""
    assert findings(TRAIN.format(**CASE | changes), "HS277") == []
