"""Scripts in the style of real repositories: correct code that looks wrong, and mistakes that are hard to see.

The first line of a file in `looks_wrong/` states why the code looks wrong but is not, and the first line of a file in
`mistakes/` lists the expected findings as `CODE:line` before its explanation. The `pytorch_*` files re-type the loops
of PyTorch's "Automatic Mixed Precision examples".
"""

import re
from pathlib import Path

import pytest

from halfstep.check.files.document import language_of, read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection

HERE = Path(__file__).parent
LOOKS_WRONG = sorted((HERE / "looks_wrong").glob("*.*"))
MISTAKES = sorted((HERE / "mistakes").glob("*.*"))


def expected(path):
    """The findings that the first line of a file lists."""
    return re.findall(r"HS\d{3}:\d+", path.read_text().partition("\n")[0])


def actual(path):
    """The findings of all rules in a file, in the order of their lines."""
    document = read_document(path.name, path.read_bytes(), language_of(path.name))
    return [f"{finding.code}:{finding.line}" for finding in check_document(document, Settings(), Selection())]


@pytest.mark.parametrize("path", LOOKS_WRONG, ids=lambda path: path.stem)
def test_correct_code_that_looks_wrong_is_silent(path):
    """No rule reports correct code; the Apex script alone gets the advice that Apex is unmaintained."""
    assert actual(path) == expected(path)
    assert not expected(path) or path.name == "apex.py"


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_a_mistake_is_found_however_it_is_wrapped(path):
    """Exactly the findings that the first line lists are reported, at their lines."""
    assert expected(path)
    assert actual(path) == expected(path)


def test_every_file_explains_itself():
    """The first line of each file is a comment with a sentence."""
    first_lines = [path.read_text().partition("\n")[0] for path in (*LOOKS_WRONG, *MISTAKES)]
    assert [line for line in first_lines if not re.fullmatch(r"# .+\.", line)] == []
    assert LOOKS_WRONG
    assert MISTAKES
