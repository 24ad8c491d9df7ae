"""Flags of which at most one may be true: which the user can set, and which stay true."""

import ast

import pytest

from halfstep.check.config.flags import by_default, flag_facts, offered, on_by_itself
from halfstep.check.files.document import read_document
from halfstep.check.runner import check_document
from halfstep.check.script.syntax.names import read_names
from halfstep.check.select import Selection
from halfstep.check.settings import Settings

FACTS = {offered("fp16"), on_by_itself("bf16")}


def facts(fp16, bf16, before=""):
    """The facts about the call at the end of a script, or in a function before it."""
    tree = ast.parse(f"import torch\n{before}TrainingArguments('out', fp16={fp16}, bf16={bf16})\n")
    nodes = tuple(ast.walk(tree))
    names = read_names((n, False) for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom)))
    calls = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "TrainingArguments"]
    return flag_facts(calls[-1], nodes, names)  # one in a function comes after those of the module


@pytest.mark.parametrize(
    ("fp16", "bf16"),
    [
        ("args.fp16", "True"),
        ("bool(args.use_fp16)", "True"),
        ("config['fp16']", "True"),
        ("config.get('training_fp16', False)", "True"),
        ("getattr(args, 'fp16', False)", "torch.cuda.is_bf16_supported()"),
        ("args.mixed_precision == 'fp16'", "torch.cuda.is_available() and torch.cuda.is_bf16_supported()"),
        ("args.fp16", "args.bf16 if args.bf16 is not None else torch.cuda.is_bf16_supported()"),
    ],
)
def test_an_option_next_to_a_flag_that_stays_true(fp16, bf16):
    """Whoever asks for fp16 gets both."""
    assert facts(fp16, bf16) == FACTS


@pytest.mark.parametrize(
    ("fp16", "bf16", "before"),
    [
        ("args.fp16", "args.bf16", ""),
        ("args.fp16", "not args.fp16", ""),
        ("args.mixed_precision != 'bf16'", "True", ""),
        ("not torch.cuda.is_bf16_supported()", "torch.cuda.is_bf16_supported()", ""),
        ("args.fp16", "True", "args = Args()\nargs.fp16 = False\n"),
        ("args.fp16", "True", "if args.fp16:\n    parser.error('bf16 only')\n"),
        ("options['fp16']", "True", "options = {'fp16': False}\n"),
        ("Settings.fp16", "True", "class Settings:\n    fp16 = False\n"),
        ("fp16", "True", "fp16 = compute()\n"),
        (
            "args.fp16",
            "args.bf16",
            "if args.bf16 is None and not args.fp16:\n    args.bf16 = torch.cuda.is_bf16_supported()\n",
        ),
    ],
)
def test_flags_that_depend_on_each_other_or_are_fixed(fp16, bf16, before):
    """A flag that follows the other one, an early stop, and values that the script writes out."""
    assert facts(fp16, bf16, before) == frozenset()


def test_a_parameter_and_a_fallback():
    """`def train(fp16=False)` offers the flag, unless the function changes it; `config.bf16` may fall back to the GPU's answer."""
    function = "def train(fp16=False):\n    {}TrainingArguments('out', fp16=fp16, bf16=True)\n"
    assert facts("False", "False", function.format("")) == FACTS
    assert facts("False", "False", function.format("fp16 = False\n    ")) == frozenset()
    fallback = "if config.bf16 is None:\n    config.bf16 = torch.cuda.is_bf16_supported()\n"
    assert facts("config.fp16 or False", "config.bf16 or False", fallback) == FACTS


FP16 = "parser.add_argument('--fp16', action='store_true')\n"
PARSED = "args = parser.parse_args()\n"


@pytest.mark.parametrize(
    "bf16",
    [
        "parser.add_argument('--bf16', action='store_true', default=True)\n",
        "parser.add_argument('--no-bf16', dest='bf16', action='store_false')\n",
        "parser.add_argument('--bf16', action=argparse.BooleanOptionalAction, default=True)\n",
        "parser.add_argument('--bf16', action='store_true')\nparser.set_defaults(bf16=True)\n",
    ],
)
def test_an_option_that_is_on_by_default_stays_on(bf16):
    """`--fp16` alone leaves `--bf16` on where that is its default."""
    assert facts("args.fp16", "args.bf16", FP16 + bf16 + PARSED) == FACTS | {by_default("bf16")}


@pytest.mark.parametrize(
    ("bf16", "after"),
    [
        ("parser.add_argument('--bf16', action='store_true')\n", ""),
        ("parser.add_argument('--bf16', default=None)\n", ""),
        ("parser.add_argument('--bf16', default=True)\n", "if args.fp16: args.bf16 = False\n"),
        ("parser.add_argument('--bf16', default=True)\n", "args.bf16 = args.bf16 and not args.fp16\n"),
        ("parser.add_argument('--bf16', default=True)\n", "if args.fp16 and args.bf16: parser.error('one')\n"),
        ("", "args = Namespace(fp16=True, bf16=False)\n"),
    ],
)
def test_an_option_that_something_switches_off_does_not(bf16, after):
    """An option that is off by default, that the script changes, or whose clash it reports, proves nothing."""
    assert facts("args.fp16", "args.bf16", FP16 + bf16 + PARSED + after) == frozenset()


OPTIONS = """\
import argparse
from transformers import TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument("--cpu", action="store_true")
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()
options = dict(output_dir="out", fp16={fp16})
if args.bf16:
    {body}
TrainingArguments(**options)
"""


@pytest.mark.parametrize(
    ("fp16", "body", "expected"),
    [
        ("not args.cpu", "options['bf16'] = True", True),
        ("not args.cpu", "options.update(bf16=True)", True),
        ("not args.cpu", "options['bf16'] = True\n    options['fp16'] = False", False),
        ("not args.bf16", "options['bf16'] = True", False),
        ("args.fp16", "options['bf16'] = True", False),
    ],
)
def test_a_flag_that_a_branch_adds(fp16, body, expected):
    """The other flag of the dictionary is on unless the user asks for a CPU, which is another option."""
    document = read_document("train.py", OPTIONS.format(fp16=fp16, body=body).encode(), "python")
    codes = {finding.code for finding in check_document(document, Settings(), Selection())}
    assert ("HS271" in codes) == expected
