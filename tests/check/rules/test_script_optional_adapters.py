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


NAMED = """\
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

def low_rank_for(mode):
{body}

def main(mode):
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16)
    args = DPOConfig("out", fp16=True)
    DPOTrainer(model=model, args=args, peft_config=low_rank_for(mode), train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("    if mode == 'full':\n        return None\n    return LoraConfig(r=8)", ["HS166"]),
        ("    if mode == 'adapter':\n        return LoraConfig(r=8)", ["HS166"]),
        ("    if mode == 'small':\n        return LoraConfig(r=8)\n    return LoraConfig(r=64)", []),
        ("    if mode == 'small':\n        return LoraConfig(r=8)\n    else:\n        return LoraConfig(r=64)", []),
    ],
)
def test_function_that_makes_a_configuration_attaches_nothing(body, expected):
    """Whatever its name is, what counts is whether every path of it returns a configuration."""
    assert codes(NAMED.format(body=body)) == expected
    assert codes(NAMED.format(body=body).replace("low_rank_for", "peft_config_for")) == expected


PARSED = """\
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config

options, args = TrlParser((ModelConfig, SFTConfig)).parse_args_and_config()
model = AutoModelForCausalLM.from_pretrained(options.model_name_or_path, dtype=torch.bfloat16)
SFTTrainer(model=model, args=args, peft_config={config}, train_dataset=data).train()
"""


@pytest.mark.parametrize(("config", "expected"), [("get_peft_config(options)", ["HS277"]), ("LoraConfig()", [])])
def test_configuration_of_trl_is_none_by_default(config, expected):
    """TRL's `get_peft_config` returns None without --use_peft; its parser leaves DeepSpeed to the command line."""
    text = PARSED.format(config=config)
    assert codes(text) == expected
    assert codes(f"# accelerate launch --config_file deepspeed.yaml\n{text}") == []


BESIDE = """\
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

model = AutoModelForImageTextToText.from_pretrained(name, dtype=torch.{dtype})
{above}model = get_peft_model(model, LoraConfig())
{below}
Trainer(model=model, args=TrainingArguments("out", bf16=True), train_dataset=data).train()
"""
LOOP = "for p in model.projector.parameters():\n    p.requires_grad = True"


@pytest.mark.parametrize(
    ("dtype", "above", "below", "expected"),
    [
        ("bfloat16", "", LOOP, ["HS277"]),
        ("bfloat16", "", "if args.train_projector:\n    model.projector.requires_grad_(True)", ["HS277"]),
        ("float32", "", LOOP, []),
        ("bfloat16", f"{LOOP}\n", "print(model)", []),
        ("bfloat16", "", f"{LOOP}\nmodel.projector.float()", []),
        ("bfloat16", "", f"model.projector = Projector()\n{LOOP}", []),
        ("bfloat16", "", LOOP.replace("projector", "lora_layers"), []),
        ("bfloat16", "", LOOP.replace("True", "False"), []),
    ],
)
def test_layer_that_is_trained_whole_next_to_adapters_is_reported(dtype, above, below, expected):
    """Layers enabled below `get_peft_model` have the dtype of the load, unless they are new or cast to float32."""
    assert codes(BESIDE.format(dtype=dtype, above=above, below=below)) == expected


UNQUANTIZED = """\
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM
def main(cfg):
    if cfg.{option}:
        model = AutoModelForCausalLM.from_pretrained(cfg.path, quantization_config=make(cfg), dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(cfg.path, dtype=torch.bfloat16)
    if cfg.{other}:
        model = get_peft_model(model, adapter(cfg))
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in data:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("option", "other", "is_said"), [("quantize", "lora", True), ("qlora", "qlora", False)])
def test_a_model_that_is_not_quantized_may_have_adapters(option, other, is_said):
    """The condition of the load leaves adapters open, so the message names them; a condition about adapters does not."""
    reported = findings(UNQUANTIZED.format(option=option, other=other), "HS151")
    assert [f.line for f in reported] == [8]
    assert ("no adapter is used" in reported[0].message) == is_said
