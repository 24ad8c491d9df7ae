"""Dictionaries of DeepSpeed whose values options choose: the run without options has their defaults."""

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.check.settings import Settings

SCRIPT = """\
import argparse
import copy

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--zero", type=int, default={default}, choices=[0, 1, 2])
parser.add_argument("--dtype", default="bf16")
BASE = {{"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {{"stage": 1}}}}


def make_config(args{params}):
    {body}
    return config


args = parser.parse_args()
optimizer = torch.optim.RMSprop(model.parameters())
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=make_config(args))
"""
COPIED = 'config = copy.deepcopy(BASE)\n    config["zero_optimization"]["stage"] = args.zero'
WRITTEN = 'config = {"train_batch_size": 8, "zero_optimization": {"stage": args.zero}}'
PARAMETER = 'config = {"train_batch_size": 8, "zero_optimization": {"stage": stage}}'
ALLOWED = WRITTEN + '\n    config["zero_allow_untested_optimizer"] = True'
CHOSEN = 'config = {"train_batch_size": 8, "zero_optimization": {"stage": 0 if args.tiny else args.zero}}'


def reported(text: str) -> set[str]:
    """The codes of the rules that report something in a script or its configurations."""
    return {f.code for f in check_document(read_document("train.py", text.encode(), "python"), Settings(), Selection())}


@pytest.mark.parametrize(
    ("body", "default", "params", "is_bad"),
    [
        (COPIED, 1, "", True),
        (WRITTEN, 2, "", True),
        (PARAMETER, 0, ", stage: int = 2", True),
        (COPIED, 0, "", False),
        (WRITTEN, None, "", False),
        (ALLOWED, 2, "", False),
        (CHOSEN, 2, "", False),
        (PARAMETER, 2, ", stage: int = 0", False),
        ("args.zero = pick()\n    " + WRITTEN, 2, "", False),
    ],
)
def test_the_default_of_an_option_decides_the_stage(body: str, default: object, params: str, is_bad: bool) -> None:
    """An untested optimizer is reported where the default of the stage is above 0, and nothing else sets or chooses it."""
    text = SCRIPT.format(body=body, default=default, params=params)
    assert ("HS242" in reported(text)) is is_bad


def test_a_comparison_with_the_default_switches_a_mode() -> None:
    """`"fp16": {"enabled": args.dtype == "fp16"}` is off, and bf16 on, in the run without options."""
    modes = '"fp16": {"enabled": args.dtype == "fp16"}, "bf16": {"enabled": args.dtype == "bf16"}'
    text = SCRIPT.format(body='config = {"train_batch_size": 8, ' + modes + "}", default=0, params="")
    assert "HS201" not in reported(text)
    assert "HS201" in reported(text.replace('== "fp16"', '!= "fp32"'))
