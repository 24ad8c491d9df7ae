"""Findings as text."""

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.files.source import Cell, Source
from halfstep.check.finding import Edit, Finding, Fix
from halfstep.check.fixing import Fixed
from halfstep.check.runner import FileResult
from halfstep.check.session import Outcome
from halfstep.report.check_text import as_concise, as_text

SOURCE = Source("a.py", "x = 1\n\tclip(model)\n", "python")


def finding(**fields):
    values = {
        "code": "HS104", "name": "clip-before-unscale", "severity": "error", "path": "a.py", "line": 2, "column": 2,
        "message": "It is clipped.", "instead": "unscale first", "end_line": 2, "end_column": 13,
    }  # fmt: skip
    return Finding(**{**values, **fields})


def outcome(*findings, source=SOURCE, **fields):
    return Outcome((FileResult("a.py", findings, source),) if findings else (), 3, **fields)


def test_a_finding_is_place_line_caret_and_advice():
    """The complete layout of a finding, with tabs as four columns."""
    assert as_text(outcome(finding())) == (
        "a.py:2:2: HS104 [error] It is clipped.\n"
        "   2 |     clip(model)\n"
        "     |     ^^^^^^^^^^^\n"
        "   = instead: unscale first\n"
        "\n"
        "3 files checked, 1 finding in 1 file: 1 error."
    )


def test_no_findings_is_one_line():
    """Without findings the text is the summary alone."""
    assert as_text(outcome()) == "3 files checked, no findings."


def test_the_summary_counts_severities_and_fixes():
    """The summary has the findings by severity and how many --fix would fix."""
    fix = Fix("t", (Edit(0, 1, ""),))
    text = as_text(outcome(finding(fix=fix), finding(severity="advice"), finding(severity="warning", line=1)))
    assert text.endswith(
        "3 findings in 1 file: 1 error, 1 warning, 1 advice. 1 fixable with --fix (preview with --diff)."
    )


def test_colours_only_when_asked():
    """Plain text has no escape sequences, and coloured text has."""
    assert "\033" not in as_text(outcome(finding()))
    assert "\033[31m[error]\033[0m" in as_text(outcome(finding()), colour=True)


def test_the_text_of_a_file_cannot_move_the_cursor():
    """Control characters in names and lines are shown as question marks."""
    source = Source("a.py", "x = '\033[2J\u202e'\n", "python")
    text = as_text(outcome(finding(path="\033]0;a.py", line=1, column=1, message="\rhidden"), source=source))
    assert "\033" not in text
    assert "\r" not in text
    assert "\u202e" not in text


def test_a_very_long_line_is_cropped_around_the_finding():
    """The carets are under the finding, on a line that fits."""
    source = Source("a.py", "x" * 5000 + "HERE" + "y" * 5000, "python")
    text = as_text(outcome(finding(line=1, column=5001, end_line=1, end_column=5005), source=source))
    line, carets = text.split("\n")[1:3]
    assert len(line) < 200
    assert line[carets.index("^") : carets.index("^") + 4] == "HERE"


def test_a_notebook_names_the_cell():
    """The location has the cell, and the line counts inside it."""
    source = Source("n.ipynb", "x = 1\ny = 2\n", "notebook", (Cell(1, 1, 1), Cell(2, 2, 1)))
    text = as_text(outcome(finding(path="n.ipynb", cell=2, line=1, column=1, end_line=1, end_column=2), source=source))
    assert text.startswith("n.ipynb:cell 2:1:1: HS104")
    assert "   1 | y = 2\n     | ^\n" in text


def test_a_finding_without_a_source_has_no_excerpt():
    """A finding in a file that could not be opened shows no source line."""
    assert "|" not in as_text(outcome(finding(code="HS001"), source=None))


def test_fixed_files_are_listed_with_their_result():
    """Each file is listed with its number of fixes, or with the reason why it was not changed."""
    before = read_document("a.py", b"x", "python")
    done = Fixed(before, before, (), (finding(),))
    failed = Fixed(before, before, (), (finding(),), "it is read-only")
    text = as_text(outcome(fixed=(done, failed)))
    assert "a.py: fixed 1 finding\n" in text
    assert "a.py: not changed, it is read-only\n" in text


@pytest.mark.parametrize(
    ("before", "columns"),
    [
        ("abc = ", 6),
        ("\u65e5\u672c = ", 7),
        ("\U0001f600; ", 4),
        ("e\u0301; ", 3),
        ("\t", 4),
        ("a\t\u65e5\t", 8),
        ("\uff21;", 3),
    ],
)
def test_carets_stand_under_the_text_after_wide_characters(before, columns):
    """East Asian characters and emoji have two columns of a terminal, combining marks none, and tabs are expanded."""
    source = Source("a.py", f"{before}HERE\n", "python")
    start = len(before) + 1
    text = as_text(outcome(finding(line=1, column=start, end_line=1, end_column=start + 4), source=source))
    line, carets = text.split("\n")[1:3]
    assert carets == "     | " + " " * columns + "^^^^"
    assert line.endswith("HERE")
    assert "\t" not in line


def test_carets_are_as_wide_as_the_text_they_mark():
    """A finding over wide characters has two carets for each."""
    source = Source("a.py", "f('\u65e5\u672c')\n", "python")
    text = as_text(outcome(finding(line=1, column=1, end_line=1, end_column=8), source=source))
    assert text.split("\n")[2] == "     | " + "^" * 9


def test_concise_is_one_line_for_each_finding():
    """Place, code, severity and message; then the summary."""
    lines = as_concise(outcome(finding(), finding(line=1))).split("\n")
    assert lines[0] == "a.py:2:2: HS104 [error] It is clipped."
    assert len(lines) == 3


def test_findings_of_the_baseline_are_counted():
    """The summary has how many were left out."""
    assert as_text(outcome(num_known=2)) == "3 files checked, no findings (2 in the baseline)."
