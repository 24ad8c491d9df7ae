"""Progress: recorded line by line, read in spite of damage, and turned into the checkpoint."""

import json
from pathlib import Path

import pytest

from halfstep.errors import SettingError
from halfstep.learning.progress import (
    BOXES,
    NUM_PRACTICES,
    Progress,
    checkpoint,
    read_progress,
    record_answers,
    record_practice,
    record_unit,
    state_file,
)
from halfstep.learning.questions import QUESTIONS
from halfstep.learning.units import UNITS


@pytest.fixture
def file(tmp_path):
    """A file in a directory that does not exist yet."""
    return tmp_path / "state" / "learn.jsonl"


def test_boxes_name_existing_things():
    """Units, questions and practices of every box exist, and each practice ticks a box."""
    assert len(BOXES) == 5
    for box in BOXES:
        assert set(box.units) <= set(UNITS)
        assert all(1 <= number <= len(QUESTIONS) for number in box.questions)
    assert {number for box in BOXES for number in box.practices} == set(range(1, NUM_PRACTICES + 1))


def test_what_is_recorded_is_read_back(file):
    """Units, answers and practices; the last record about a thing counts."""
    assert read_progress(file) == Progress()
    record_unit("formats", holds=False, path=file)
    record_unit("formats", holds=True, path=file)
    record_answers({1: True, 2: False}, file)
    record_practice(3, passed=True, path=file)
    assert read_progress(file) == Progress({"formats": True}, {1: True, 2: False}, {3: True})
    assert all("date" in json.loads(line) for line in file.read_text().splitlines())


@pytest.mark.parametrize(
    "damage",
    [
        b'{"kind": "unit", "na',
        b"\x00\xff\xfe",
        b"[1, 2]",
        b"null",
        b'{"kind": "unit", "name": 3, "holds": 1}',
        b"[" * 5000,
    ],
)
def test_a_damaged_file_loses_nothing(file, damage):
    """A damaged or torn line is skipped and stays; lines before and after it count."""
    record_unit("formats", holds=True, path=file)
    with file.open("ab") as out:
        out.write(damage)  # without a newline: a write that was cut short
    assert read_progress(file).units == {"formats": True}
    record_unit("memory", holds=True, path=file)
    progress = read_progress(file)
    assert progress.units == {"formats": True, "memory": True}
    assert damage in file.read_bytes()
    # A record whose fields have other types may be one of a later version.
    assert progress.num_damaged == (0 if damage.startswith(b'{"kind": "unit", "name"') else 1)


def test_records_of_a_later_version_are_ignored(file):
    """A kind that this version does not know is not damage."""
    file.parent.mkdir()
    file.write_text('{"kind": "certificate", "name": "x"}\n')
    assert read_progress(file) == Progress()


def test_a_box_needs_its_units_and_questions():
    """Units with all claims true and right answers tick it; a false claim or a wrong answer does not."""
    box = BOXES[0]
    done = Progress(dict.fromkeys(box.units, True), dict.fromkeys(box.questions, True))
    assert [state.ticked for state in checkpoint(done)] == [True, False, False, False, False]
    wrong = Progress(done.units, {**done.answers, box.questions[0]: False})
    state = checkpoint(wrong)[0]
    assert not state.ticked
    assert state.missing == (f"halfstep learn quiz (question {box.questions[0]})",)
    untrue = Progress(dict.fromkeys(box.units, False), done.answers)
    assert checkpoint(untrue)[0].missing == (f"halfstep learn {box.units[0]}",)


@pytest.mark.parametrize("number", range(1, NUM_PRACTICES + 1))
def test_a_passed_practice_ticks_its_box(number):
    """One that failed does not."""
    expected = [number in box.practices for box in BOXES]
    assert [s.ticked for s in checkpoint(Progress(practices={number: True}))] == expected
    assert not any(s.ticked for s in checkpoint(Progress(practices={number: False})))


def test_the_directory_follows_the_environment(monkeypatch, tmp_path):
    """HALFSTEP_STATE, then XDG_STATE_HOME if it is absolute, then the home directory."""
    monkeypatch.setenv("HALFSTEP_STATE", str(tmp_path / "own"))
    assert state_file() == tmp_path / "own" / "learn.jsonl"
    monkeypatch.delenv("HALFSTEP_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_file() == tmp_path / "halfstep" / "learn.jsonl"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_file() == tmp_path / ".local" / "state" / "halfstep" / "learn.jsonl"


def test_without_a_home_directory_the_error_has_the_remedy(monkeypatch):
    """The message names HALFSTEP_STATE."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("HALFSTEP_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(SettingError, match="HALFSTEP_STATE"):
        state_file()
