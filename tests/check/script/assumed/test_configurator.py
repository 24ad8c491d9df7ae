"""Global variables that a configurator replaces are settings: the file is checked with each of their values."""

import pytest

from halfstep.check.files.source import Source
from halfstep.check.script.assumed.scripts import assumed_scripts
from halfstep.check.script.script import read_script
from halfstep.check.settings import Settings

TEXT = """\
import sys, torch
dtype = 'bfloat16'
{configurator}
ptdtype = {{'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}}[dtype]
scaler = torch.amp.GradScaler(enabled=dtype == 'float16')
scaler.scale(loss).backward()
scaler.step(optimizer)
"""


def values(text):
    """The values with which a script is checked."""
    source = Source("train.py", text, "python")
    return {str(assumption) for assumption, _ in assumed_scripts(read_script(source, Settings()))}


@pytest.mark.parametrize(
    "configurator",
    [
        "exec(open('configurator.py').read())",
        "for a in sys.argv[1:]:\n    key, value = a[2:].split('=')\n    globals()[key] = value",
        "globals().update(read_settings('run.yaml'))",
    ],
)
def test_a_configurator_replaces_globals(configurator):
    """nanoGPT's `exec`, and assignments to `globals()`."""
    assert values(TEXT.format(configurator=configurator)) == {"dtype='float16'", "dtype='bfloat16'", "dtype='float32'"}


@pytest.mark.parametrize(
    "configurator",
    [
        "",
        "config = {k: globals()[k] for k in ('dtype',)}",
        "exec(open('c.py').read())\ndef cast(x, dtype):\n    return x.to(dtype)",
    ],
)
def test_other_globals_keep_their_value(configurator):
    """Nothing writes them, or a function has a parameter of the same name."""
    assert values(TEXT.format(configurator=configurator)) == set()
