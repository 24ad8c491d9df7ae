"""Lines that are not Python 3: replaced at the same positions, so that the rest of the script is checked."""

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.files.repair import repair

CLIPPED = """\
import torch
{line}
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    scaler.scale(model(x)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""
CONFLICT = "<<<<<<< HEAD\nlr = 1\n=======\nlr = 2\n>>>>>>> branch"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("!nvidia-smi", "IPython syntax"),
        ("!pip install -U torch \\\n    accelerate", "IPython syntax"),
        ("%cd /content", "IPython syntax"),
        ("%matplotlib inline", "IPython syntax"),
        ("%%time", "IPython syntax"),
        ("pip install torch", "IPython syntax"),
        ("files = !ls data", "IPython syntax"),
        ("if True:\n    !mkdir {folder}", "IPython syntax"),
        ("print 'loss', 1", "Python 2"),
        ('print "epoch %d" % epoch', "Python 2"),
        (CONFLICT, "a merge marker"),
    ],
)
def test_a_line_that_is_not_python_does_not_hide_the_script(line, kind):
    """The text has the same length and line breaks, and parses; the document notes the first such line."""
    text = CLIPPED.format(line=line)
    repaired = repair(text)
    assert repaired.kind == kind
    assert [len(row) for row in repaired.text.split("\n")] == [len(row) for row in text.split("\n")]
    assert repaired.text.split("\n")[-5:] == text.split("\n")[-5:]
    document = read_document("train.py", text.encode(), "python")
    assert document.problem is None
    assert [note.code for note in document.notes] == ["HS004"]
    assert document.notes[0].severity == ("advice" if kind == "IPython syntax" else "error")
    assert document.notes[0].line == repaired.line


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        "message = (\n    'loss'\n    % loss\n)\n",  # a line that starts with an operator
        "text = '''\n!pip install torch\n'''\n",
        "print (1)\nprint = log\n",
        "!nvidia-smi\nx = (\n",  # parses in no way
        "<<<<<<< HEAD\nx = (\n=======\nx = 2\n>>>>>>> b\n",
    ],
)
def test_a_text_that_parses_or_cannot_be_repaired_stays(text):
    """Only a text that fails to parse, and parses without such lines, is changed."""
    assert repair(text) is None


def test_a_merge_is_read_as_its_first_side():
    """The second side is blanked, so nothing is read twice."""
    repaired = repair("<<<<<<< HEAD\na = 1\n||||||| base\nb = 1\n=======\nc = 1\n>>>>>>> other\n")
    assert repaired.text.split() == ["a", "=", "1"]
