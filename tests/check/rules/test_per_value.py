"""Mistakes that a script makes for one value of a precision setting only."""

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection

LOADED = """\
import argparse
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--mixed_precision", default="bf16", choices={choices})
args = parser.parse_args()

def dtype_of(name):
    if not torch.cuda.is_available():
        return torch.float32
    return {{"fp16": torch.float16, "bf16": torch.bfloat16}}.get(name, torch.float32)

accelerator = Accelerator(mixed_precision=args.mixed_precision)
model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=dtype_of(args.mixed_precision))
{lift}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""
SCALED = """\
import torch

class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg

    def step(self, x, y):
        dtype = {{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}}[self.cfg.dtype]
        scaler = torch.GradScaler("cuda", enabled=(self.cfg.dtype == "{name}"))
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            loss = self.loss(self.model(x), y)
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()
"""


def findings(text, code):
    """The findings of one rule, by the runner, which checks each value."""
    document = read_document("train.py", text.encode(), "python")
    return [f for f in check_document(document, Settings(), Selection()) if f.code == code]


def reported(text, code):
    """The first words of what a rule reports, with the severity."""
    return [(f.severity, f.message.partition(",")[0]) for f in findings(text, code)]


def test_weights_in_the_format_of_the_option_that_a_scaler_rejects():
    """Only "fp16" gives float16 weights and a loss scale."""
    text = LOADED.format(choices=["no", "fp16", "bf16"], lift="")
    assert reported(text, "HS199") == [("error", "with mixed_precision='fp16'")]


@pytest.mark.parametrize(
    "parts",
    [
        {"choices": ["no", "bf16"], "lift": ""},
        {"choices": ["no", "fp16", "bf16"], "lift": "model.float()"},
        {"choices": ["no", "fp16", "bf16"], "lift": "if args.mixed_precision == 'fp16':\n    model.float()"},
        {
            "choices": ["no", "fp16", "bf16"],
            "lift": "if args.mixed_precision == 'fp16':\n    raise ValueError('bf16 only')",
        },
    ],
)
def test_values_that_are_rejected_or_cast_back_are_right(parts):
    """The option does not accept it, the weights are cast to float32 again, or the script raises."""
    assert reported(LOADED.format(**parts), "HS199") == []


def test_a_scaler_that_is_enabled_by_another_name_of_the_format():
    """The table knows "fp16", the test "float16": the one float16 run has no loss scale."""
    assert reported(SCALED.format(name="float16"), "HS123") == [("error", "with dtype='fp16'")]
    assert reported(SCALED.format(name="fp16"), "HS123") == []


def test_a_finding_for_one_value_has_no_fix():
    """What is right for this value would be wrong for the others."""
    found = findings(LOADED.format(choices=["fp16", "bf16"], lift=""), "HS199")
    assert [f.fix for f in found] == [None]
