"""A comparison as a value, read from one or several directories."""

import dataclasses
import json
import re

import pytest

from comparison_cases import ENVIRONMENT, write_case
from halfstep.comparison.result import read_comparison
from halfstep.errors import SettingError


def test_a_comparison_prints_table_and_verdict(tmp_path):
    """The text has every row and ends with the verdict."""
    comparison = read_comparison([write_case(tmp_path / "c")])
    text = str(comparison)
    assert all(row.label in text for row in comparison.rows)
    assert text.endswith(comparison.verdict.text)
    assert text.splitlines()[0].startswith("precision")


def test_a_comparison_is_a_table_in_a_notebook(tmp_path):
    """The HTML has every row and the verdict."""
    comparison = read_comparison([write_case(tmp_path / "c")])
    page = comparison._repr_html_()
    assert page.count("<tr>") == 1 + len(comparison.rows)
    assert all(row.label in page for row in comparison.rows)
    assert "<p>" in page


def test_a_comparison_is_frozen_and_strict_json(tmp_path):
    """It converts to strict JSON with infinities as strings, and cannot be modified."""
    comparison = read_comparison([write_case(tmp_path / "c")])
    values = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))
    assert values["rows"][1]["figures"]["speedup"] == comparison.row("bf16").speedup.value
    assert any("inf" in curve["grad_norm"] for curve in values["curves"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        comparison.noise = 1


def test_gates_look_at_the_rows(tmp_path):
    """A gate reads the figures of the comparison's rows."""
    comparison = read_comparison([write_case(tmp_path / "c")])
    assert comparison.gate("bf16.speedup > 1.9").failed
    assert not comparison.gate("bf16.speedup < 1.9").failed
    with pytest.raises(SettingError, match="bf16, fp16"):
        comparison.gate("bf17.speedup > 1")
    with pytest.raises(SettingError, match="There is no row"):
        comparison.row("bf17")


def test_a_row_that_failed_or_did_not_run_passes_no_gate(tmp_path):
    """Its remaining seeds and counters do not count, and after a stop it is still a known row."""
    failures = {"fp16": {"kind": "not installed", "reason": "no fp16"}}
    folder = write_case(tmp_path / "c", failures=failures, stopped=True)
    run = folder / "runs" / "fp32-1.jsonl"
    run.write_text(re.sub(r'"loss":[0-9.e-]+(?=,"grad_norm")', '"loss":"nan"', run.read_text()))
    for path in (folder / "runs").glob("bf16-*"):
        path.unlink()
    comparison = read_comparison([folder])
    assert [row.status for row in comparison.rows] == ["failed", "failed"]
    for gate in ("fp32.loss > 100", "fp32.step_ms > 1e9", "fp16.skips > 5", "bf16.loss_gap > 100"):
        result = comparison.gate(gate)
        assert result.failed
        assert "not measured" in result.values


def test_the_loss_of_a_row_that_was_cut_short_passes_no_gate(tmp_path):
    """Its loss and metric are of another step than those of other rows; its speed and its gap to fp32 still count."""
    comparison = read_comparison([write_case(tmp_path / "c")])
    rows = tuple(dataclasses.replace(row, cut_at=20 if row.label == "bf16" else None) for row in comparison.rows)
    comparison = dataclasses.replace(comparison, rows=rows)
    for gate in ("bf16.loss > 100", "bf16.val_loss > 100", "bf16.metric > fp32.metric"):
        assert "not measured" in comparison.gate(gate).values
    assert not comparison.gate("bf16.speedup < 1 or bf16.loss_gap > 100 or fp32.loss > 100").failed


def test_machines_stand_side_by_side(tmp_path):
    """Labels include the machine, and every row is compared with the fp32 of its machine."""
    one = write_case(tmp_path / "a", machine="CPU A")
    two = write_case(tmp_path / "b", (("fp32", 0.001, {}), ("bf16", 0.0001, {})), machine="GPU B", device="cuda")
    comparison = read_comparison([one, two])
    assert [row.label for row in comparison.rows] == [
        "fp32 @ CPU A",
        "bf16 @ CPU A",
        "fp16 @ CPU A",
        "fp32 @ GPU B",
        "bf16 @ GPU B",
    ]
    assert comparison.row("bf16 @ CPU A").speedup.value == pytest.approx(2, rel=0.03)
    assert comparison.row("bf16 @ GPU B").speedup.value == pytest.approx(10, rel=0.03)
    assert "On CPU A: Use bf16" in comparison.verdict.text
    assert "On GPU B: Use bf16" in comparison.verdict.text


def test_the_same_rows_twice_on_one_machine_stay_apart(tmp_path):
    """They are numbered, because they may be from different days."""
    comparison = read_comparison([write_case(tmp_path / "a"), write_case(tmp_path / "b")])
    assert [row.label for row in comparison.rows][::3] == ["fp32 @ a CPU #1", "fp32 @ a CPU #2"]


def test_directories_of_one_machine_are_merged(tmp_path):
    """Different rows of the same job, machine and batch form one table, with the reference of either directory."""
    one = write_case(tmp_path / "a", (("bf16", 0.004, {}),))
    two = write_case(tmp_path / "b", (("fp32", 0.010, {}),))
    comparison = read_comparison([one, two])
    assert [row.label for row in comparison.rows] == ["bf16", "fp32"]
    assert comparison.row("bf16").speedup.value == pytest.approx(2.5, rel=0.03)
    assert any("several directories" in note for note in comparison.notes)
    other_torch = write_case(tmp_path / "d", (("fp16", 0.01, {}),), environment={**ENVIRONMENT, "torch": "2.9.0"})
    assert "fp16 @ a CPU #2" in [row.label for row in read_comparison([one, other_torch]).rows]


@pytest.mark.parametrize("setting", [{"seed": 7}, {"max_norm": None}, {"steps": 80}])
def test_directories_with_other_settings_stay_apart(tmp_path, setting):
    """Another clip, seed or length would look like an effect of the precision."""
    one = write_case(tmp_path / "a", (("fp32", 0.010, {}),))
    settings = {**json.loads((one / "survey.json").read_text())["settings"], **setting}
    two = write_case(tmp_path / "b", (("bf16", 0.004, {}),), settings=settings)
    comparison = read_comparison([one, two])
    assert [row.label for row in comparison.rows] == ["fp32 @ a CPU #1", "bf16 @ a CPU #2"]
    assert comparison.row("bf16 @ a CPU #2").speedup is None
    threads = write_case(tmp_path / "c", (("fp16", 0.004, {}),), threads=8)
    assert "fp16 @ a CPU #2" in [row.label for row in read_comparison([one, threads]).rows]


def test_different_weights_are_noticed(tmp_path):
    """Digests that differ between the rows of a repeat have a note."""
    folder = write_case(tmp_path / "c")
    path = folder / "runs" / "bf16-1.jsonl"
    path.write_text(path.read_text().replace('"weights":"w1"', '"weights":"other"'))
    assert any("initial weights of repeat 1 differ" in note for note in read_comparison([folder]).notes)


def test_notes_cover_stops_surveys_and_shapes(tmp_path):
    """A stop, the survey's notes and misaligned shapes on a GPU are noted."""
    folder = write_case(tmp_path / "c", device="cuda", stopped=True, notes=["a note"])
    notes = read_comparison([folder]).notes
    assert "a note" in notes
    assert any("stopped early" in note for note in notes)
    assert any("64x32x10" in note and "multiple of 8" in note for note in notes)
    assert not any("64x32x10" in note for note in read_comparison([write_case(tmp_path / "cpu")]).notes)


def test_a_note_compares_compiled_and_eager_gradients(tmp_path):
    """It has the difference between the two and that of each from fp32; without the other form there is no note."""
    case = (("fp32", 0.010, {}), ("bf16", 0.005, {}), ("bf16,compile=on", 0.004, {}), ("fp16,compile=on", 0.004, {}))
    notes = [note for note in read_comparison([write_case(tmp_path / "c", case)]).notes if "first gradients" in note]
    assert notes == [
        "bf16,compile=on: its first gradients differ from those of bf16 by 0.003 (relative); from fp32's they differ by 0.01, "
        "those of bf16 by 0.01."
    ]


def test_a_stop_names_the_rows_with_fewer_repeats(tmp_path):
    """Their losses are means over other seeds, and the note explains how to compare them."""
    folder = write_case(tmp_path / "c", stopped=True)
    (folder / "runs" / "bf16-2.jsonl").unlink()
    (note,) = (note for note in read_comparison([folder]).notes if "stopped early" in note)
    assert note.startswith(
        "The comparison was stopped early. Only part of the 3 repeats is complete for bf16 (2): compare"
    )
    assert "fp16" not in note
    for path in (folder / "runs").glob("fp16-*"):
        path.unlink()
    (note,) = (note for note in read_comparison([folder]).notes if "stopped early" in note)
    assert note.startswith("The comparison was stopped early: 1 of 3 rows did not run. Only part of")


def test_directories_without_a_comparison_raise(tmp_path):
    """No directory at all, or one without a survey, is an error."""
    with pytest.raises(SettingError, match="no directory"):
        read_comparison([])
    with pytest.raises(SettingError, match="There is no comparison in"):
        read_comparison([tmp_path])
