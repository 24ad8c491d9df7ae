"""Flags of training arguments that are strings, or on together, through options, variables and the environment."""

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.check.settings import Settings


def reported(text):
    """The codes of all findings in a script."""
    document = read_document("train.py", text.encode(), "python")
    return {finding.code for finding in check_document(document, Settings(), Selection())}


HEAD = "import argparse\nimport os\nimport torch\nfrom transformers import TrainingArguments\n"
OPTION = (
    HEAD
    + "parser = argparse.ArgumentParser()\nparser.add_argument('--fp16', {option})\nargs = parser.parse_args()\n"
    + "training = TrainingArguments('out', fp16={value})\n"
)


@pytest.mark.parametrize(
    ("option", "value", "is_reported"),
    [
        ("default='False'", "args.fp16", True),
        ("type=str, default='no'", "bool(args.fp16)", True),
        ("type=str, default='False'", "args.fp16 == 'True'", False),
        ("type=str2bool, default='False'", "args.fp16", False),
        ("action='store_true'", "args.fp16", False),
        ("default='auto'", "args.fp16", False),
    ],
)
def test_a_string_option_that_reads_as_false_is_true(option, value, is_reported):
    """argparse keeps "False" as a string unless a type converts it, and TrainingArguments does not convert it."""
    assert ("HS275" in reported(OPTION.format(option=option, value=value))) is is_reported


@pytest.mark.parametrize(
    ("value", "is_reported"),
    [
        ("os.environ.get('FP16', 'False')", True),
        ("os.getenv('FP16', '0')", True),
        ("os.getenv('FP16', '0') == '1'", False),
        ("os.getenv('FP16', 'False').lower() == 'true'", False),
    ],
)
def test_a_variable_of_the_environment_is_a_string(value, is_reported):
    """Its default "False" enables fp16, unless the script compares it."""
    text = f"{HEAD}HALF = {value}\ntraining = TrainingArguments('out', fp16=HALF)\n"
    assert ("HS275" in reported(text)) is is_reported


@pytest.mark.parametrize(("half", "is_reported"), [("on_gpu", True), ("on_gpu and not supported", False)])
def test_flags_of_variables_that_are_both_on(half, is_reported):
    """On a GPU with bfloat16 `torch.cuda.is_available()` and the question for bfloat16 are both true."""
    text = (
        f"{HEAD}on_gpu = torch.cuda.is_available()\n"
        "supported = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)\n"
        f"training = TrainingArguments('out', fp16={half}, bf16=supported)\n"
    )
    assert ("HS271" in reported(text)) is is_reported
