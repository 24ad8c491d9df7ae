"""Comments that silence findings, and those that silence nothing."""

import json

import pytest

from check_toys import use_toys
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings, Source
from halfstep.check.finding import Finding
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


@pytest.mark.parametrize(
    "text",
    [
        "f(\n    BAD,\n    x,\n)  # halfstep: ignore[HS901] after the bracket, where formatters put it",
        "f(  # halfstep: ignore[HS901] before the arguments\n    x,\n    BAD,\n)",
        "f(\n    BAD,  # halfstep: ignore[HS901]\n    x,\n)",
        "f(\n    # halfstep: ignore[HS901] above the argument\n    BAD,\n    x,\n)",
        "# halfstep: ignore[HS901] above the statement\nf(\n    x,\n    BAD,\n)",
        "with a(\n    BAD\n):  # halfstep: ignore[HS901]\n    pass",
        "x = BAD + \\\n    1  # halfstep: ignore[HS901]",
        'x = (BAD, """\n# text\n""")  # halfstep: ignore[HS901]',
    ],
)
def test_a_comment_applies_to_a_statement_over_several_lines(text):
    """On its first or last line, on the line itself, or above."""
    assert codes(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "f(\n    x,  # halfstep: ignore[HS901] of another argument\n    BAD,\n)",
        "if x:  # halfstep: ignore[HS901] does not cover the body\n    BAD",
        "f(\n    x,\n)  # halfstep: ignore[HS901]\nBAD",
    ],
)
def test_a_comment_does_not_apply_to_other_lines(text):
    """Another argument, the body of a block, the next statement."""
    assert "HS901" in codes(text)


def test_a_finding_around_the_comment_is_suppressed():
    """A call over several lines has the finding, and one of its arguments the comment."""
    source = Source("a.py", "f(\n    x,\n    y,  # halfstep: ignore[HS901]\n)\n", "python")
    (comment,) = find_suppressions(source)
    finding = Finding("HS901", "bad-word", "error", "a.py", 1, 1, "m", end_line=4, end_column=2)
    assert comment.suppresses(finding, 1, 4)
    assert not comment.suppresses(finding, 1, 9)  # a block around the statement


def notebook(*cells):
    data = json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}).encode()
    findings = check_document(read_document("n.ipynb", data, "notebook"), Settings(), Selection())
    return [(f.code, f.cell, f.line) for f in findings]


def test_comments_in_notebooks_apply_to_their_cell():
    """On the line, above it, after magics; the last comment of a cell does not reach into the next one."""
    assert notebook("BAD  # halfstep: ignore[HS901]", "BAD") == [("HS901", 2, 1)]
    assert notebook("%matplotlib inline\n!pip install x\n# halfstep: ignore[HS901]\nBAD") == []
    assert notebook("x = 1\n# halfstep: ignore[HS901]", "BAD") == [("HS007", 1, 2), ("HS901", 2, 1)]
    assert notebook("# halfstep: ignore-file[HS901]", "BAD", "f(\n  BAD\n)") == []
    assert notebook("def f(:\n", "BAD  # halfstep: ignore[HS901]") == [("HS004", 1, 1)]


@pytest.mark.parametrize(
    ("language", "text", "lines"),
    [
        ("json", '{"a": 1, // halfstep: ignore[HS201]\n"b": 2}', {1}),
        ("json", '{\n/* halfstep: ignore[HS201] */\n"b": 2}', {2, 3}),
        ("json", '{"a": "http://x // halfstep: ignore[HS201]", "b": \'# halfstep: ignore\'}', None),
        ("json", '{"a": "\\"# halfstep: ignore[HS201]"}', None),
        ("json", '{"a": "http://x", # halfstep: ignore[HS201]\n}', {1}),
        ("yaml", "a: it's # halfstep: ignore[HS201] don't\n", {1}),
        ("yaml", "a: 'x # halfstep: ignore[HS201]'\n", None),
        ("yaml", "a: x#halfstep: ignore[HS201]\n", None),
        ("yaml", "# halfstep: ignore[HS201]\n\na: 1\n", {1, 3}),
        ("toml", "a = '''\n# halfstep: ignore[HS201]\n'''\n", None),
        ("toml", "a = 1 # halfstep: ignore[HS201]\n", {1}),
    ],
)
def test_comments_in_configurations(language, text, lines):
    """In each language's own form, and not inside strings."""
    assert [set(s.lines) for s in find_suppressions(Source("c", text, language))] == ([lines] if lines else [])
