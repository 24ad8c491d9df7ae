"""HS615: `allow_tf32` and `set_float32_matmul_precision` set the same switch, and the last one counts."""

import pytest

from check_scripts import findings

HEAD = """\
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--tf32", action="store_true")
parser.add_argument("--precision", default="high", choices=["highest", "high"])
parser.add_argument("--other")
args = parser.parse_args()
"""
ALLOW = "torch.backends.cuda.matmul.allow_tf32 = {}\n"
CUDNN = "torch.backends.cudnn.allow_tf32 = False\n"
CHOOSE = "torch.set_float32_matmul_precision({})\n"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (ALLOW.format("args.tf32") + CHOOSE.format("'high'"), 2),
        (ALLOW.format("args.tf32") + CUDNN + "print('settings')\n" + CHOOSE.format("args.precision"), 4),
        (ALLOW.format("False") + CUDNN + CHOOSE.format("'medium'"), 3),
        (ALLOW.format("True") + CHOOSE.format("'highest'"), 2),
        (CHOOSE.format("args.precision") + ALLOW.format("args.tf32"), 2),
        (CHOOSE.format("'high'") + ALLOW.format("False"), 2),
    ],
)
def test_a_setting_that_the_next_one_overwrites(body, line):
    """An option or a literal that asks for something else than the last setting."""
    assert [f.line - 6 for f in findings(HEAD + body, "HS615")] == [line]


@pytest.mark.parametrize(
    "body",
    [
        ALLOW.format("True") + CHOOSE.format("'high'"),
        ALLOW.format("False") + CHOOSE.format("'highest'"),
        ALLOW.format("True") + CHOOSE.format("args.precision"),  # the option decides
        ALLOW.format("args.tf32") + CHOOSE.format("'high' if args.tf32 else 'highest'"),
        ALLOW.format("args.tf32") + CHOOSE.format("args.other"),  # no default
        ALLOW.format("row['tf32']") + CHOOSE.format("row['precision']"),  # of one table
        ALLOW.format("False") + "measure()\n" + CHOOSE.format("'high'"),
        "if args.tf32:\n    " + ALLOW.format("True") + "else:\n    " + CHOOSE.format("'highest'"),
        CUDNN + CHOOSE.format("'high'"),
    ],
)
def test_settings_that_agree(body):
    """The same request twice, the other branch, convolutions, and a switch between two measurements."""
    assert findings(HEAD + body, "HS615") == []
