"""A comparison as a value, read from one or several directories."""

import dataclasses
import json
import re

import pytest

from comparison_cases import ENVIRONMENT, write_case
from halfstep.comparison.result import read_comparison
from halfstep.errors import SettingError


def test_a_comparison_prints_table_and_verdict(tmp_path):
    """Every row, then the paragraph."""
    comparison = read_comparison([write_case(tmp_path / "c")])
    text = str(comparison)
    assert all(row.label in text for row in comparison.rows)
    assert text.endswith(comparison.verdict.text)
    assert text.splitlines()[0].startswith("precision")


def test_the_value_is_json_and_frozen(tmp_path):
    """Strict JSON holds it, infinities as text; nobody changes it."""
    comparison = read_comparison([write_case(tmp_path / "c")])
    values = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))
    assert values["rows"][1]["figures"]["speedup"] == comparison.row("bf16").speedup.value
    assert any("inf" in curve["grad_norm"] for curve in values["curves"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        comparison.noise = 1


def test_gates_look_at_the_rows(tmp_path):
    """A gate asks the figures of the comparison."""
    comparison = read_comparison([write_case(tmp_path / "c")])
    assert comparison.gate("bf16.speedup > 1.9").failed
    assert not comparison.gate("bf16.speedup < 1.9").failed
    with pytest.raises(SettingError, match="bf16, fp16"):
        comparison.gate("bf17.speedup > 1")
    with pytest.raises(SettingError, match="There is no row"):
        comparison.row("bf17")


def test_a_row_that_failed_or_was_not_run_passes_no_gate(tmp_path):
    """Not by the seeds that were left, nor by skips that nobody could count; and a stop does not make it unknown."""
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
        assert "not measured" in result.seen


def test_machines_stand_side_by_side(tmp_path):
    """Rows carry their machine's name, and are compared with its own fp32."""
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


def test_the_same_rows_twice_on_one_machine_are_two(tmp_path):
    """Numbered, because they may be from different days."""
    comparison = read_comparison([write_case(tmp_path / "a"), write_case(tmp_path / "b")])
    assert [row.label for row in comparison.rows][::3] == ["fp32 @ a CPU #1", "fp32 @ a CPU #2"]


def test_instalments_on_one_machine_become_one_comparison(tmp_path):
    """Other rows of the same job, machine and batch join the table, against the reference of the other directory."""
    one = write_case(tmp_path / "a", (("bf16", 0.004, {}),))
    two = write_case(tmp_path / "b", (("fp32", 0.010, {}),))
    comparison = read_comparison([one, two])
    assert [row.label for row in comparison.rows] == ["bf16", "fp32"]
    assert comparison.row("bf16").speedup.value == pytest.approx(2.5, rel=0.03)
    assert any("several directories" in note for note in comparison.notes)
    other_torch = write_case(tmp_path / "d", (("fp16", 0.01, {}),), environment={**ENVIRONMENT, "torch": "2.9.0"})
    assert "fp16 @ a CPU #2" in [row.label for row in read_comparison([one, other_torch]).rows]


@pytest.mark.parametrize("setting", [{"seed": 7}, {"max_norm": None}, {"steps": 80}])
def test_instalments_with_other_settings_stay_apart(tmp_path, setting):
    """A clip, a seed or a length of its own would look like what the precision did."""
    one = write_case(tmp_path / "a", (("fp32", 0.010, {}),))
    given = {**json.loads((one / "survey.json").read_text())["settings"], **setting}
    two = write_case(tmp_path / "b", (("bf16", 0.004, {}),), settings=given)
    comparison = read_comparison([one, two])
    assert [row.label for row in comparison.rows] == ["fp32 @ a CPU #1", "bf16 @ a CPU #2"]
    assert comparison.row("bf16 @ a CPU #2").speedup is None
    threads = write_case(tmp_path / "c", (("fp16", 0.004, {}),), threads=8)
    assert "fp16 @ a CPU #2" in [row.label for row in read_comparison([one, threads]).rows]


def test_different_weights_are_noticed(tmp_path):
    """The fingerprints of each repeat must agree between rows."""
    folder = write_case(tmp_path / "c")
    path = folder / "runs" / "bf16-1.jsonl"
    path.write_text(path.read_text().replace('"weights":"w1"', '"weights":"other"'))
    assert any("initial weights of repeat 1 differ" in note for note in read_comparison([folder]).notes)


def test_notes_name_what_to_know(tmp_path):
    """A stop, a survey's notes, shapes that miss tensor cores on a GPU."""
    folder = write_case(tmp_path / "c", device="cuda", stopped=True, notes=["a note"])
    notes = read_comparison([folder]).notes
    assert "a note" in notes
    assert any("stopped early" in note for note in notes)
    assert any("64x32x10" in note and "multiple of 8" in note for note in notes)
    assert not any("64x32x10" in note for note in read_comparison([write_case(tmp_path / "cpu")]).notes)


def test_a_stop_names_the_rows_with_fewer_repeats(tmp_path):
    """Their losses are means over other seeds, and the note says how to read them."""
    folder = write_case(tmp_path / "c", stopped=True)
    (folder / "runs" / "bf16-2.jsonl").unlink()
    (note,) = (note for note in read_comparison([folder]).notes if "stopped early" in note)
    assert note.startswith("The comparison was stopped early. Of 3 repeats, fewer are there for bf16 (2): compare")
    assert "fp16" not in note
    (folder / "runs" / "fp16-2.jsonl").unlink()
    (note,) = (note for note in read_comparison([folder]).notes if "stopped early" in note)
    assert "Of 3 repeats, all are there for fp32 alone: compare" in note


def test_other_directories_are_refused(tmp_path):
    """None at all, or one without a survey."""
    with pytest.raises(SettingError, match="no directory"):
        read_comparison([])
    with pytest.raises(SettingError, match="holds no comparison"):
        read_comparison([tmp_path])
