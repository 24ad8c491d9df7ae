"""Findings as text."""

import re

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.files.source import Cell, Source
from halfstep.check.finding import Edit, Finding, Fix
from halfstep.check.fixing import Fixed
from halfstep.check.runner import FileResult
from halfstep.check.session import Outcome
from halfstep.report.check_formats import render
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


LONG = "the gradients are clipped while they are still multiplied by the scale, which makes the limit smaller by its factor"


@pytest.mark.parametrize("width", [60, 80])
def test_a_finding_is_folded_at_the_width_of_the_terminal(width):
    """No line is wider, the place stays whole on the first one, and no word is lost."""
    shown = finding(message=LONG, instead=LONG)
    text = as_text(outcome(shown, source=Source("a.py", f"x = 1\n\tclip({'model, ' * 20})\n", "python")), width=width)
    lines = text.split("\n")
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("a.py:2:2: HS104 [error] the gradients")
    assert " ".join(text.split()).count(LONG) == 2


def test_a_path_with_blanks_is_not_folded():
    """An editor opens the whole place, however narrow the terminal is."""
    path = "my experiments/second try with clipping/train the model.py"
    assert as_text(outcome(finding(path=path)), width=40).startswith(f"{path}:2:2: HS104 [error] It")


def test_colours_do_not_change_where_a_finding_is_folded():
    """Escape codes have no width."""
    plain = as_text(outcome(finding(message=LONG)), width=60)
    coloured = as_text(outcome(finding(message=LONG)), width=60, colour=True)
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == plain


def test_code_to_write_instead_is_not_folded():
    """Advice of several lines is code, which must be copied as it is."""
    code = "with autocast():\n    loss = criterion(model(the_first_input, the_second_input), the_target)"
    lines = as_text(outcome(finding(instead=code)), width=60).split("\n")
    assert "                  loss = criterion(model(the_first_input, the_second_input), the_target)" in lines


def test_outside_a_terminal_and_in_concise_a_finding_is_one_line():
    """Programs read one finding per line."""
    assert f"a.py:2:2: HS104 [error] {LONG}" in as_text(outcome(finding(message=LONG))).split("\n")
    assert f"a.py:2:2: HS104 [error] {LONG}" in render(outcome(finding(message=LONG)), "concise", width=60).split("\n")


def test_a_wide_line_is_cropped_by_columns():
    """East Asian characters have two columns, and the crop is marked."""
    source = Source("a.py", "x = 1\n" + "\u8a13" * 30 + "clip(model)" + "\u7df4" * 30 + "\n", "python")
    shown = finding(column=31, end_column=42)
    line, carets = as_text(outcome(shown, source=source), width=60).split("\n")[1:3]
    wide = sum(char in "\u8a13\u7df4" for char in line)
    assert len(line) + wide <= 60
    assert line.endswith("...")
    start = line.index("clip(model)")  # the finding is in the part that is shown
    assert carets.index("^") == start + sum(char in "\u8a13\u7df4" for char in line[:start])
