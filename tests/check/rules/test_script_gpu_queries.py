"""HS133 and HS167: options and formats that a query for the GPU decides."""

import pytest

from check_scripts import reported

OPTION = """\
import argparse
import torch
from transformers import TrainingArguments
{setup}
parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true", default={default})
{more}
args = parser.parse_args()
training = TrainingArguments("out", fp16=args.fp16)
"""
QUERY = """\
import torch

def choose():
    if not torch.cuda.is_available():
        return torch.float32
    supported = {value}
    if {test}:
        return torch.bfloat16
    return torch.float16

model = model.to(choose())
"""
AVAILABLE = "torch.cuda.is_available()"
OFF = 'parser.add_argument("--no-fp16", dest="fp16", action="store_false")'


@pytest.mark.parametrize(
    ("setup", "default"),
    [
        ("", AVAILABLE),
        ("", f"True if {AVAILABLE} else False"),
        (f"ON_GPU = {AVAILABLE}", "ON_GPU"),
    ],
)
def test_option_that_is_on_with_every_gpu(setup, default):
    """HS133 on a store_true option whose default is True wherever training runs."""
    assert reported(OPTION.format(setup=setup, default=default, more="")) == {"HS133"}


@pytest.mark.parametrize(
    ("default", "more"),
    [
        (AVAILABLE, OFF),
        (f"not {AVAILABLE}", ""),
        ("read_default()", ""),
        (f"{AVAILABLE} and wants_half()", ""),
        (AVAILABLE, "parser.set_defaults(fp16=False)"),
    ],
)
def test_options_that_can_be_off(default, more):
    """No finding where another option, the parser or other code can switch it off."""
    assert reported(OPTION.format(setup="", default=default, more=more)) == set()


@pytest.mark.parametrize(
    ("value", "test"),
    [
        ('getattr(torch.cuda, "is_bf16_supported", None)', "callable(supported) and supported()"),
        ("torch.cuda.is_bf16_supported", "supported()"),
    ],
)
def test_query_in_a_variable(value, test):
    """HS167 where the query is called by the name of a variable."""
    assert reported(QUERY.format(value=value, test=test)) == {"HS167"}


@pytest.mark.parametrize(
    ("value", "test"),
    [
        ('getattr(torch.cuda, "is_bf16_supported", None)', "supported and supported(including_emulation=False)"),
        ('getattr(torch.xpu, "is_bf16_supported", None)', "supported and supported()"),
        ("read_support", "supported()"),
    ],
)
def test_other_queries_in_a_variable(value, test):
    """No finding for a query without emulation, of another device or of other code."""
    assert "HS167" not in reported(QUERY.format(value=value, test=test))
