"""HS166 and HS277: 16-bit weights that a Trainer trains in full where an option leaves out LoRA or quantization."""

import pytest

from check_scripts import findings

RANK = """\
import torch
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

def reward_arguments(cfg):
    options = to_container(cfg.training)
    chosen = RewardConfig(**options)
    return chosen

def adapter(cfg):
    if cfg.rank == 0:
        {end}
    return LoraConfig(r=cfg.rank)

def main(cfg):
    model = AutoModelForSequenceClassification.from_pretrained(cfg.name, torch_dtype=torch.bfloat16)
    trainer = RewardTrainer(model=model, args=reward_arguments(cfg), peft_config=adapter(cfg), train_dataset=data)
    trainer.train()
"""
GUARDED = """\
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

def read(path):
    {first}
    try:
        return LoraConfig.from_pretrained(path)
    except OSError:
        return None

model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
SFTTrainer(model=model, args=SFTConfig("out"), peft_config=read("lora"), train_dataset=data).train()
"""
BRANCHES = """\
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer, TrainingArguments

def load(cfg):
    options = {{"device_map": "auto"}}
    if cfg.load_in_8bit:
        options["load_in_8bit"] = True
        options["torch_dtype"] = torch.float16
    elif cfg.load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True)
        options["torch_dtype"] = torch.float16
    else:
        options["torch_dtype"] = {dtype}
    model = AutoModelForCausalLM.from_pretrained(cfg.name, **options)
    if cfg.load_in_8bit or cfg.load_in_4bit:
        model = prepare_model_for_kbit_training(model)
    return model, AutoTokenizer.from_pretrained(cfg.name)

model, tokenizer = load(cfg)
{attach}
Trainer(model=model, args=TrainingArguments("out", {flag}=True), train_dataset=data).train()
"""
OPTIONAL = "if cfg.use_lora:\n    model = get_peft_model(model, LoraConfig())"
ALWAYS = "model = get_peft_model(model, LoraConfig())"


def codes(text):
    return [f.code for f in findings(text, "HS166", "HS277")]


@pytest.mark.parametrize(
    ("end", "expected"), [("return None", ["HS277"]), ("return", ["HS277"]), ("raise ValueError('rank')", [])]
)
def test_function_that_returns_no_adapter_leaves_full_training(end, expected):
    """`peft_config=adapter(cfg)` of a function with `return None` trains all weights in the runs that reach it."""
    assert codes(RANK.format(end=end)) == expected


@pytest.mark.parametrize(("first", "expected"), [("if not path:\n        return None", ["HS277"]), ("print(path)", [])])
def test_none_after_an_error_is_no_option(first, expected):
    """A function that returns None where an adapter cannot be read does not decide to train all weights."""
    assert codes(GUARDED.format(first=first)) == expected


@pytest.mark.parametrize(
    ("dtype", "flag", "attach", "expected"),
    [
        ("torch.bfloat16", "bf16", OPTIONAL, ["HS277"]),
        ("torch.float16", "fp16", OPTIONAL, ["HS166"]),
        ("torch.float16 if cuda else torch.float32", "bf16", OPTIONAL, ["HS277"]),
        ("torch.float32", "bf16", OPTIONAL, []),
        ("torch.bfloat16", "bf16", ALWAYS, []),
        ("torch.float16", "fp16", ALWAYS, []),
    ],
)
def test_branch_without_quantization_is_judged_by_itself(dtype, flag, attach, expected):
    """Of a dtype per branch, the quantization of one branch does not excuse the other; an adapter in every run does."""
    assert codes(BRANCHES.format(dtype=dtype, flag=flag, attach=attach)) == expected


def test_quantization_in_every_branch_is_no_finding():
    """Where each branch quantizes, no run trains 16-bit weights."""
    text = BRANCHES.format(dtype="torch.bfloat16", flag="bf16", attach=OPTIONAL)
    both = text.replace("    else:\n", "    else:\n        options['load_in_8bit'] = True\n")
    assert codes(both.replace("if cfg.load_in_8bit or cfg.load_in_4bit:", "if True:")) == []
