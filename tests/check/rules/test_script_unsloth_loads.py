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


BRANCHES = """\
import torch
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel
def main(args):
    if {test}:
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        model, tokenizer = FastLanguageModel.from_pretrained(args.model, dtype=dtype, load_in_4bit={four})
    else:
        model, tokenizer = FastLanguageModel.from_pretrained(args.model, load_in_4bit=True)
    {guard}model = FastLanguageModel.get_peft_model(model, r=8)
    trainer = SFTTrainer(model=model, args=SFTConfig("out"), train_dataset=data)
    trainer.train()
"""
LORA = "if not args.full_finetune: "


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, [7]),
        ({"four": "True"}, []),
        ({"four": "False, float32_mixed_precision=True"}, []),
        ({"guard": ""}, []),
        ({"guard": "if args.adapt: "}, []),
        ({"test": "args.big"}, []),
    ],
)
def test_the_branch_without_adapters_trains_all_weights(changes, lines):
    """An option that leaves the adapters out loads a model of its own, which the Trainer updates in 16 bits."""
    case = {"test": "args.full_finetune", "four": "False", "guard": LORA} | changes
    assert [f.line for f in findings(BRANCHES.format(**case), "HS277")] == lines
