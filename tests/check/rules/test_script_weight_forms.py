"""Regions, dtypes and weights in the forms of real scripts: helper methods, sibling functions, models for evaluation alone."""

import pytest

from check_scripts import findings, reported

QLORA = """\
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments
from trl import SFTTrainer

def load():
    bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.{train})
    return AutoModelForCausalLM.from_pretrained("a/b", quantization_config=bnb)

def train():
    model = load()
    trainer = SFTTrainer(model=model, args=TrainingArguments("out", bf16=True), train_dataset=data)
    trainer.train()
    return trainer.model

def main(zero_shot):
    if zero_shot:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)
        model = AutoModelForCausalLM.from_pretrained("a/b", quantization_config=config)
    else:
        model = train()
    evaluate(model)
"""


def test_a_quantized_model_that_is_only_evaluated_computes_in_what_it_likes():
    """HS268 is about the 4-bit layers of the model that the Trainer trains, not of another one in the same file."""
    assert findings(QLORA.format(train="bfloat16"), "HS268") == []
    assert [f.line for f in findings(QLORA.format(train="float16"), "HS268")] == [6]


TIMED = """\
import time
import torch
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

def {name}(model_name):
    model = AutoModelForCausalLM.from_pretrained(model_name, torch_dtype=torch.{dtype})
    trainer = DPOTrainer(model=model, args=DPOConfig("out", bf16=True), train_dataset=data)
    start = time.time()
    trainer.train()
    return time.time() - start
"""


@pytest.mark.parametrize("name", ["run_timing_test", "sample_run", "run"])
def test_a_function_that_loads_and_trains_is_no_evaluation(name):
    """HS277 reads what a function does: `run_timing_test` loads a model and trains it."""
    assert [f.line for f in findings(TIMED.format(name=name, dtype="bfloat16"), "HS277")] == [7]
    assert findings(TIMED.format(name=name, dtype="float32"), "HS277") == []


MASKED = """\
import torch
from torch.nn.functional import cross_entropy

def reconstruction(logits, target, mask):
    if mask is None:
        return cross_entropy(logits.float(), target)
    each = cross_entropy(logits, target, reduction="none")
    return (each * mask).sum() / mask.sum()

for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = decoder(x)
    loss = reconstruction(logits, y, {mask})
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_loss_that_no_caller_reaches_is_silent():
    """HS154 reads a branch only if some caller passes what leads there."""
    assert findings(MASKED.format(mask="None"), "HS154") == []
    assert [f.line for f in findings(MASKED.format(mask="mask"), "HS154")] == [7]


HOLDER = """\
import torch

class Holder:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def compute_loss(self, x, y):
        with torch.autocast("cuda", dtype=torch.{dtype}):
            out = self.model(x)
        loss = ((out - y) ** 2).mean()
        return {{"total": loss, "mse": loss}}, {{"norm": out.norm()}}

    def optimizer_step(self, loss):
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train_step(self, x, y):
        losses, stats = self.compute_loss(x, y)
        self.optimizer_step(losses["total"])
        return losses, stats

    def train_epoch(self, loader):
        for x, y in loader:
            self.train_step(x, y)
"""


@pytest.mark.parametrize(("dtype", "code"), [("float32", "HS134"), ("bfloat16", "HS120"), ("float16", "")])
def test_one_method_computes_the_loss_and_its_caller_passes_it_to_another(dtype, code):
    """The region of a loss is found where the method with the backward receives the result of the one with the region."""
    assert reported(HOLDER.format(dtype=dtype)) & {"HS134", "HS120", "HS123"} == ({code} if code else set())
