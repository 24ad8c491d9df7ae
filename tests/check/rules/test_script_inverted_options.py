"""HS603 and HS117: options that do the opposite of their name, and settings of precision that nothing binds."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule reports something."""
    return [f.line for f in findings(text, code)]


PARSER = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument({option})
args = parser.parse_args()
with torch.autocast("cuda", enabled={enabled}):
    model(x)
"""


@pytest.mark.parametrize(
    ("option", "enabled", "expected"),
    [
        ("'--use_amp', action='store_false'", "args.use_amp", [4]),
        ("'--amp', action='store_false', default=True, help='disable AMP'", "args.amp", [4]),
        ("'-a', '--mixed-precision', action='store_false'", "args.mixed_precision", [4]),
        ("'--fp16', dest='use_fp16', action='store_false'", "args.use_fp16", [4]),
        ("'--amp', action='store_const', const=False, default=True", "args.amp", [4]),
        ("'--no_amp', action='store_false'", "args.no_amp", []),
        ("'--no_amp', dest='amp', action='store_false'", "args.amp", []),
        ("'--amp', '--no-amp', dest='amp', action='store_false'", "args.amp", []),
        ("'--amp', action='store_true'", "args.amp", []),
        ("'--amp', action='store_false'", "not args.amp", []),
        ("'--fp32', dest='amp', action='store_false'", "args.amp", []),
        ("'--half_resolution', action='store_false'", "True", []),
    ],
)
def test_an_option_that_stores_false(option, enabled, expected):
    """Its name is the feature and its value the opposite, unless the script turns the value round."""
    assert lines(PARSER.format(option=option, enabled=enabled), "HS603") == expected


UNBOUND = """\
import torch
{head}
def context(name):
    {before}
    return torch.autocast("cuda", dtype=_DTYPE_MAP.get(name, torch.bfloat16))
"""


@pytest.mark.parametrize(
    ("head", "before", "expected"),
    [
        ("", "pass", [5]),
        ("_DTYPE_MAP = {'fp16': torch.float16}", "pass", []),
        ("from .tables import *", "pass", []),
        ("from .tables import _DTYPE_MAP", "pass", []),
        ("exec(open('configurator.py').read())", "pass", []),
        ("", "global _DTYPE_MAP", []),
        ("def setup():\n    global _DTYPE_MAP\n    _DTYPE_MAP = {}", "pass", []),
        ("", "_DTYPE_MAP = {}", []),
    ],
)
def test_a_table_of_dtypes_that_nothing_binds(head, before, expected):
    """A name that the file neither assigns nor imports raises NameError, unless something may add it."""
    assert lines(UNBOUND.format(head=head, before=before), "HS117") == expected
