"""Names of precisions that a script takes from a table or from one of its functions."""

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.check.settings import Settings

TABLE = "import lightning as L\nNAMES = {{'half': {half!r}, 'full': '32-true'}}\ntrainer = L.Trainer(precision=NAMES[mode])\n"
FUNCTION = (
    "import lightning as L\n\ndef name_of(mode):\n    match mode:\n        case 'half':\n            return {half!r}\n"
    "        case _:\n            return '32-true'\n\ntrainer = L.Trainer(precision=name_of(mode))\n"
)


def reported(text):
    """The codes of all findings in a script."""
    document = read_document("train.py", text.encode(), "python")
    return {finding.code for finding in check_document(document, Settings(), Selection())}


@pytest.mark.parametrize("text", [TABLE, FUNCTION])
@pytest.mark.parametrize(("half", "is_reported"), [("fp16", True), ("16-mixed", False)])
def test_each_name_that_a_table_or_a_function_gives_is_one_of_lightning(text, half, is_reported):
    """A run may choose any entry of a table, and any value that a function returns."""
    assert ("HS281" in reported(text.format(half=half))) is is_reported


def test_a_name_that_the_script_replaces_is_not_passed_on():
    """A value that is compared with elsewhere may be translated before it is passed."""
    text = TABLE.format(half="fp16") + "name = '16-mixed' if mode == 'fp16' else mode\n"
    assert "HS281" not in reported(text)
