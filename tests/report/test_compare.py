"""A comparison at a terminal."""

from dataclasses import replace
from pathlib import Path

from comparison_cases import write_case
from halfstep.comparison.result import read_comparison
from halfstep.comparison.survey import read_survey
from halfstep.report.compare import CompareProgress, as_text


def test_text_has_rows_verdict_gates_and_files(tmp_path):
    """The text has rows, verdict, gates, notes and files, within the requested width."""
    comparison = read_comparison([write_case(tmp_path / "c", notes=["worth knowing"])])
    gate = comparison.gate("bf16.speedup > 1")
    text = as_text(comparison, [("report", Path("/out/report.html"))], [gate], width=120)
    assert all(row.label in text for row in comparison.rows)
    assert "Use bf16 here" in text
    assert "FAILED: fail if bf16.speedup > 1" in text
    assert "note: worth knowing" in text
    assert "report   /out/report.html" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "\x1b[" not in text
    assert "\x1b[" in as_text(comparison, colour=True)


def test_a_row_that_was_cut_short_is_readable_at_80_columns(tmp_path):
    """No line is wider, and values of another step name it; validation and both kinds of memory are explained."""
    comparison = read_comparison([write_case(tmp_path / "c")])
    rows = tuple(replace(row, cut_at=42 if row.label == "fp16" else None) for row in comparison.rows)
    text = as_text(replace(comparison, rows=rows), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "at step 42" in text
    assert "Validation, with samples/s: fp32 500 ms (720/s)" in text
    assert "predicts for A100 40GB, 64 MiB of it" in " ".join(text.split())


def test_different_warm_ups_are_shown_as_a_range(tmp_path):
    """Rows from several directories may have different numbers of warm-up steps."""
    comparison = read_comparison([write_case(tmp_path / "case")])
    first, *others = comparison.rows
    mixed = replace(comparison, rows=(replace(first, warmup_steps=4), *others))
    assert "Warm-up, not timed: the first 4 to 10 steps of each run" in as_text(mixed)
    assert "Warm-up, not timed: the first 10 steps of each run" in as_text(comparison)


def test_progress_without_a_terminal_is_a_line_per_repeat(capsys, tmp_path):
    """Without a terminal there is one line per repeat, not per step, and failures are printed verbatim."""
    progress = CompareProgress()
    folder = write_case(tmp_path / "c", repeats=2, notes=["a note"])
    progress.surveyed(read_survey(folder), 40)
    for repeat in (0, 0, 0, 1, 1):
        progress.stepped("bf16", repeat, 5)
    progress.failed("fp16", 1, "reason [bold]")
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("repeat ") for line in lines) == 2
    assert "note: a note" in lines
    assert "fp16 failed in repeat 2: reason [bold]" in lines
