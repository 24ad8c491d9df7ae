"""A script is checked with a GPU that has bfloat16, and with one that has not."""

import ast

import pytest

from halfstep.check.files.source import Source
from halfstep.check.script.assumed.gpu import asks
from halfstep.check.script.assumed.scripts import assumed_scripts
from halfstep.check.script.script import read_script
from halfstep.check.settings import Settings

TEXT = """\
import torch
from transformers import Trainer
major, minor = torch.cuda.get_device_capability()
def choose():
    if {test}:
        return torch.bfloat16, {{"bf16": True}}
    return torch.float16, {{"fp16": True}}
dtype, flags = choose()
Trainer(model, args=TrainingArguments("out", **flags)).train()
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch.cuda.is_bf16_supported()", True),
        ("transformers.utils.is_torch_bf16_gpu_available()", True),
        ("torch.cuda.get_device_capability(0)[0] >= 8", True),
        ("torch.cuda.get_device_capability() >= (8, 0)", True),
        ("torch.cuda.get_device_properties(0).major > 7", True),
        ("major < 8", False),
        ("major <= 7", False),
        ("major >= 9", None),  # Hopper
        ("major >= 7", None),  # tensor cores
        ("batch_size >= 8", None),
        ("torch.cuda.is_available()", None),
    ],
)
def test_questions(text, expected):
    """The forms of the question, and other comparisons."""
    assert asks(ast.parse(text, mode="eval").body) is expected


@pytest.mark.parametrize("test", ["torch.cuda.is_bf16_supported()", "major >= 8"])
def test_each_answer_is_a_script(test):
    """Only the branch of the answer is left."""
    source = Source("train.py", TEXT.format(test=test), "python")
    scripts = {
        str(a).rpartition("=")[2]: ast.unparse(s.tree) for a, s in assumed_scripts(read_script(source, Settings()))
    }
    assert "bfloat16" in scripts["True"]
    assert "torch.float16" not in scripts["True"]
    assert "torch.float16" in scripts["False"]
    assert "bfloat16" not in scripts["False"]
