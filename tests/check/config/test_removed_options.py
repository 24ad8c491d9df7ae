"""Arguments that Lightning 2 removed, in dictionaries that a script passes as `Trainer(**options)`."""

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.check.settings import Settings

HEAD = "import pytorch_lightning as pl\n"
TRAINER = "trainer = pl.Trainer(**options)\ntrainer.fit(model)\n"
HELPER = "def make(args):\n    {name} = {{'devices': 1}}\n    {name}['amp_backend'] = 'native'\n    return {name}\n"


def reported(text):
    """The lines at which HS284 is reported."""
    document = read_document("train.py", (HEAD + text).encode(), "python")
    return [f.line for f in check_document(document, Settings(), Selection()) if f.code == "HS284"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"options = dict(gpus=1)\nif fp16:\n    options['amp_level'] = level\n{TRAINER}", [4]),
        (f"options = load()\noptions.update(more)\noptions['amp_backend'] = 'native'\n{TRAINER}", [4]),
        (
            f"options = {{}}\nif a:\n    options['amp_level'] = 'O1'\n    options['amp_backend'] = 'apex'\n{TRAINER}",
            [5],
        ),
        (HELPER.format(name="options") + f"options = make(args)\n{TRAINER}", [4]),
        (HELPER.format(name="params") + f"options = make(args)\n{TRAINER}", [4]),
        (f"options = load()\noptions['amp_backend'] = None\n{TRAINER}", []),
        (f"options = load()\noptions['precision'] = '16-mixed'\n{TRAINER}", []),
        (f"other = load()\nother['amp_backend'] = 'native'\noptions = {{}}\n{TRAINER}", []),
        (f"options = {{}}\nif pl.__version__ < '2':\n    options['amp_backend'] = 'native'\n{TRAINER}", []),
    ],
)
def test_removed_arguments_are_found_where_the_script_sets_them(text, expected):
    """A key that is set later, in a branch or in the function that returns the options, reaches the Trainer."""
    assert reported(text) == expected
