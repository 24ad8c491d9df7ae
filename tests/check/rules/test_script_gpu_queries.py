"""HS133 and HS167: options and formats that a query for the GPU decides."""

import pytest

from check_scripts import reported
from halfstep.check.files.source import Settings, Source
from halfstep.check.rules.weights.numbers import EmulatedBf16
from halfstep.check.script.script import read_script

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


CAPABILITY = """\
import torch

def choose():
    capability = torch.cuda.get_device_capability()
    {test}

model = model.to(choose())
"""
ASK = "torch.cuda.is_bf16_supported()"
PICK = "torch.bfloat16 if {} else torch.float16"


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        (
            f"if capability[0] >= 8:\n        if {ASK}:\n            return torch.bfloat16\n    return torch.float16",
            False,
        ),
        (f"if capability[0] < 8:\n        return torch.float16\n    return {PICK.format(ASK)}", False),
        (f"if not capability >= (8, 0):\n        raise ValueError\n    return {PICK.format(ASK)}", False),
        (f"major, minor = capability\n    return {PICK.format(f'major >= 8 and {ASK}')}", False),
        (f"is_ampere = capability[0] > 7\n    return {PICK.format(f'is_ampere and {ASK}')}", False),
        (f"return {PICK.format(f'capability[0] >= 8 or {ASK}')}", True),
        (f"return {PICK.format(f'capability[0] >= 7 and {ASK}')}", True),
        (f"if capability[0] >= 8:\n        print(1)\n    return {PICK.format(ASK)}", True),
        (f"if capability[0] >= 8:\n        return torch.bfloat16\n    return {PICK.format(ASK)}", True),
    ],
)
def test_a_query_behind_a_test_of_the_compute_capability_is_not_asked_of_older_gpus(test, expected):
    """HS167 is silent where a T4 does not reach the query."""
    assert ("HS167" in reported(CAPABILITY.format(test=test))) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"info = {{}}\n    info.update({{'bf16_supported': {ASK}}})\n    return info", False),
        (f"info = {{'gpu': {{'bf16_supported': bool({ASK})}}}}\n    return info", False),
        (f"info['bf16_supported'] = {ASK}\n    return info", False),
        (f"return {{'bf16_supported': {ASK}}}", False),
        (f"info = {{'bf16': {ASK}}}\n    return torch.bfloat16 if info['bf16'] else torch.float16", True),
        (f"options = {{'bf16_supported': {ASK}}}\n    return options", True),
    ],
)
def test_a_table_that_describes_the_machine_chooses_no_format(body, expected):
    """HS167 is silent for an entry of `info` that nothing in the file reads."""
    assert ("HS167" in reported(f"import torch\ndef get_device_info():\n    {body}\n")) == expected


def test_a_test_runs_in_an_emulated_format_as_well():
    """HS167 is about the time that a training takes."""
    text = f"import torch\nif {ASK}:\n    run(torch.bfloat16)\n"
    assert reported(text) == {"HS167"}
    assert list(EmulatedBf16().check(read_script(Source("tests/test_kernels.py", text, "python"), Settings()))) == []
