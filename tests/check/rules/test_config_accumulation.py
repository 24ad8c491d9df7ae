"""HS226: the micro-batches that the arguments of a Trainer set for a DeepSpeed configuration in a file."""

import json

import pytest

from halfstep.check.session import check_path

SCRIPT = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
args = TrainingArguments("out", {flags}, deepspeed="{file}")
Trainer(model=AutoModelForCausalLM.from_pretrained("gpt2"), args=args, train_dataset=data).train()
"""
ON = {"bf16": {"enabled": True}}
AUTO = {"bf16": {"enabled": "auto"}}
STEPS = {"gradient_accumulation_steps": "auto"}
BATCH = {"train_batch_size": "auto"}


@pytest.mark.parametrize(
    ("config", "flags", "count"),
    [
        (ON | STEPS, "bf16=True, gradient_accumulation_steps=16", 1),
        (AUTO | STEPS, "bf16=True, gradient_accumulation_steps=16", 1),
        (ON | BATCH, "bf16=True, gradient_accumulation_steps=16", 1),
        ({"fp16": {"enabled": "auto"}} | STEPS, "fp16=True, gradient_accumulation_steps=8", 1),
        (AUTO | STEPS, "gradient_accumulation_steps=16", 0),
        (ON | STEPS, "bf16=True, gradient_accumulation_steps=2", 0),
        (ON | STEPS, "bf16=True, gradient_accumulation_steps=steps", 0),
        (ON | STEPS | {"data_types": {"grad_accum_dtype": "fp32"}}, "bf16=True, gradient_accumulation_steps=16", 0),
        (ON, "bf16=True, gradient_accumulation_steps=16", 0),
    ],
)
def test_the_number_of_micro_batches_of_the_trainer(tmp_path, config, flags, count):
    """With "auto" the Trainer's argument counts, also for a batch from which DeepSpeed computes the number."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}} | config))
    (tmp_path / "train.py").write_text(SCRIPT.format(flags=flags, file="ds.json"))
    found = [f for f in check_path(tmp_path / "train.py") if f.code == "HS226"]
    assert len(found) == count


def test_another_configuration_than_the_one_of_the_trainer(tmp_path):
    """The Trainer names another file."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}} | ON | STEPS))
    text = SCRIPT.format(flags="bf16=True, gradient_accumulation_steps=16", file="other.json")
    (tmp_path / "train.py").write_text(text + 'evaluate("ds.json")\n')
    assert [f for f in check_path(tmp_path / "train.py") if f.code == "HS226"] == []
