"""Comments that silence findings, and those that silence nothing."""

import pytest

from check_toys import use_toys
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings, Source
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.check.suppress import find_suppressions


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """Toy rules throughout."""
    use_toys(monkeypatch)


def codes(text, **options):
    document = read_document("a.py", text.encode(), "python")
    return [finding.code for finding in check_document(document, Settings(), Selection(**options))]


@pytest.mark.parametrize(
    "text",
    [
        "BAD  # halfstep: ignore[HS901] for a reason",
        "BAD  # halfstep: ignore[HS9]",
        "BAD  # halfstep: ignore[bad-word, HS902] both\nHMM # halfstep:ignore[hs902]",
        "BAD  # noqa: E501  halfstep: ignore[error]",
        "BAD  # halfstep: ignore everything here",
        "# halfstep: ignore[HS901] the next line of code\n\n# more\nBAD",
        "x = 1\n# halfstep: ignore-file[HS901]\nBAD\nBAD",
        "x = 1\nBAD\nBAD\nHMM\n# halfstep: ignore-file",
    ],
)
def test_a_comment_suppresses_what_it_names(text):
    """A comment on the line, above it, or for the file; by code, prefix, name or severity."""
    assert codes(text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("BAD  # halfstep: ignore[HS902]", ["HS901", "HS007"]),
        ("BAD\n# halfstep: ignore[HS901]", ["HS901", "HS007"]),
        ("'''\n# halfstep: ignore-file[HS901]\n'''\nBAD", ["HS901"]),
        ("x = '# halfstep: ignore[HS901]'; BAD", ["HS901"]),
        ("BAD  # halfstep: ignored", ["HS901"]),
    ],
)
def test_a_comment_elsewhere_or_for_others_suppresses_nothing(text, expected):
    """The wrong code, the wrong line, a string or another word has no effect."""
    assert codes(text) == expected


def test_a_misspelt_code_is_reported_with_a_guess():
    """HS008 names the nearest rule, and HS007 is not reported in addition."""
    document = read_document("a.py", b"BAD  # halfstep: ignore[bad-wrod]", "python")
    finding, unknown = check_document(document, Settings(), Selection())
    assert (finding.code, unknown.code, unknown.column) == ("HS901", "HS008", 6)
    assert "Did you mean bad-word?" in unknown.message


def test_a_comment_for_rules_that_did_not_run_is_not_unused():
    """With a selection, or without a GPU for HS3xx, the comment may be needed in another run."""
    assert codes("x = 1  # halfstep: ignore[HS901]", select=("HS902",)) == []
    assert codes("x = 1  # halfstep: ignore[HS901]") == ["HS007"]
    assert codes("x = 1  # halfstep: ignore[HS901]", ignore=("HS007",)) == []


def test_lines_of_a_notebook_are_lines_of_its_cells():
    """A comment in the second cell applies to that cell."""
    raw = '{"cells": [{"cell_type": "code", "source": "x = 1"}, {"cell_type": "code", "source": "BAD # halfstep: ignore[HS901]"}]}'
    document = read_document("a.ipynb", raw.encode(), "notebook")
    assert check_document(document, Settings(), Selection()) == ()


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ('{"a": 1 // halfstep: ignore[HS2]\n}', "json"),
        ('{"a": 1 /* halfstep: ignore[HS2] */\n}', "json"),
        ('{"a": 1 # halfstep: ignore[HS2]\n}', "json"),
        ("a: 1 # halfstep: ignore[HS2]\n", "yaml"),
    ],
)
def test_configurations_have_comments_too(text, language):
    """All comment styles of the format are supported."""
    (suppression,) = find_suppressions(Source("c", text, language))
    assert (suppression.lines, suppression.selectors) == (frozenset({1}), ("HS2",))


def test_a_comment_on_its_own_line_in_a_configuration_applies_to_the_next_line():
    """Configurations behave like Python."""
    (suppression,) = find_suppressions(Source("c.yaml", "# halfstep: ignore[HS2]\n\na: 1\n", "yaml"))
    assert suppression.lines == {1, 3}
