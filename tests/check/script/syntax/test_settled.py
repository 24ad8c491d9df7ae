"""What an expression is for one value of a setting."""

import pytest

from halfstep.check.files.source import Source
from halfstep.check.script.script import read_script
from halfstep.check.script.syntax.evaluate import OPEN
from halfstep.check.script.syntax.settled import Setting, named_values
from halfstep.check.settings import Settings

TEXT = """\
import torch
use = cfg.precision != "no"
dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.half
enabled = {expression}
twice = 1
twice = 2
torch.autocast("cuda", enabled=enabled)
"""


def read(expression):
    """The outline of the file, and the expression in it."""
    outline = read_script(Source("train.py", TEXT.format(expression=expression), "python"), Settings()).outline
    value = outline.bindings["enabled"][0].value
    return outline, value


@pytest.mark.parametrize(
    ("expression", "value", "expected"),
    [
        ("use", "no", False),
        ("use", "fp16", True),
        ("dtype == torch.float16", "no", True),
        ("dtype is torch.float16", "bf16", False),
        ("use and dtype == torch.float16", "no", False),
        ("not use or unknown", "no", True),
        ("not use or unknown", "fp16", OPEN),
        ("use and unknown", "no", False),
        ("cfg['precision'] in ('fp16', 'bf16')", "bf16", True),
        ("cfg.get('precision') not in ['fp16', 'bf16']", "bf16", False),
        ("cfg.precision.lower() == 'fp16'", "fp16", True),
        ("cfg.precision in options", "fp16", OPEN),
        ("cfg.other == 'fp16'", "fp16", OPEN),
        ("twice == 1", "fp16", OPEN),
        ("torch.cuda.is_available()", "fp16", OPEN),
    ],
)
def test_an_expression_for_one_value(expression, value, expected):
    """Tests of the setting are decided, through variables and dtypes; what the file does not fix stays unknown."""
    outline, node = read(expression)
    assert Setting(outline, "precision", value).of(node, outline.module) is expected


def test_the_values_that_tests_name():
    """Those of the expression and of the variables in it."""
    outline, node = read("use and dtype == torch.float16")
    assert named_values(outline, [(node, outline.module)]) == {"precision": {"no", "bf16"}}
