"""HS270: what a run without options trains in, and which model."""

import pytest

from check_scripts import reported

HEAD = """\
import argparse, click, torch
from dataclasses import dataclass, field
from transformers import AutoModelForSeq2SeqLM, HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments
"""
TRAIN = """\
model = AutoModelForSeq2SeqLM.from_pretrained({name})
args = Seq2SeqTrainingArguments("out", {flags})
Seq2SeqTrainer(model=model, args=args, train_dataset=data).train()
"""
FIELD = """\
@dataclass
class Options:
    name: str = "google/flan-t5-large"
    half: bool = field(default={default})
(options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
"""
PARSER = """\
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="google/mt5-base")
parser.add_argument("--precision", default="{default}")
options = parser.parse_args()
FLAGS = {{"half": {{"fp16": True}}, "bfloat": {{"bf16": True}}, "full": {{}}}}
"""
COMMAND = """\
@click.command()
@click.option("--checkpoint", "name", default="google/mt5-small")
@click.option("--fast/--safe", "fast", default={default})
def main(name, fast):
    flags = {{"fp16": fast}}
    model = AutoModelForSeq2SeqLM.from_pretrained(name)
    args = Seq2SeqTrainingArguments("out", **flags)
    Seq2SeqTrainer(model=model, args=args, train_dataset=data).train()
main()
"""
STEPS = """\
from accelerate import Accelerator
def train(name="google/flan-t5-xl", precision="{default}"):
    accelerator = Accelerator(mixed_precision=precision)
    model = AutoModelForSeq2SeqLM.from_pretrained(name)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader)
    for batch in batches:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
train()
"""
OF_FIELD = TRAIN.format(name="options.name", flags="fp16=options.half")
OF_TABLE = TRAIN.format(name="options.model", flags="**FLAGS[options.precision]")
COMPARED = TRAIN.format(name="options.model", flags="fp16=options.precision == 'half'")


@pytest.mark.parametrize(
    "text",
    [
        FIELD.format(default="True") + OF_FIELD,
        PARSER.format(default="half") + OF_TABLE,
        PARSER.format(default="half") + COMPARED,
        COMMAND.format(default="True"),
        STEPS.format(default="fp16"),
    ],
    ids=["field", "table", "comparison", "command", "parameter"],
)
def test_float16_by_default(text):
    """Unless somebody asks for something else, such a model is trained in float16."""
    assert reported(HEAD + text) == {"HS270"}


@pytest.mark.parametrize(
    "text",
    [
        FIELD.format(default="False") + OF_FIELD,
        PARSER.format(default="bfloat") + OF_TABLE,
        PARSER.format(default="full") + COMPARED,
        COMMAND.format(default="False"),
        STEPS.format(default="bf16"),
        PARSER.format(default="half").replace("mt5-base", "t5-small") + OF_TABLE,
    ],
    ids=["field", "table", "comparison", "command", "parameter", "other model"],
)
def test_another_default(text):
    """float16 on request only, and a model that float16 can represent."""
    assert "HS270" not in reported(HEAD + text)
