"""A student's path, scripted: every practice by right scripts, by each mistake of the lesson, and by files that are no scripts."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import practice_scripts as scripts
import practice_styles as styles
from forked_python import forking
from halfstep.learning.practice.grading import grade_practice, judge, run_specs
from halfstep.learning.practice.launch import measure
from halfstep.learning.practice.record import Run, RunSpec
from halfstep.learning.practice.starters import starter
from halfstep.learning.practice.tasks import TASKS

CASES = {f"{task}-{name}": (task, text, set()) for task, name, text in scripts.RIGHT}
CASES |= {f"{task}-{name}": (task, text, rows) for task, name, rows, text in scripts.WRONG}
CASES |= {f"{task}-{name}": (task, text, set()) for task, name, text in styles.RIGHT}
CASES |= {f"{task}-{name}": (task, text, rows) for task, name, rows, text in styles.WRONG}
CASES |= {f"{t.number}-starter": (t.number, starter(t.number, t.title, t.file), None) for t in TASKS}
# One mistake of each kind; the rest is slow.
QUICK = [
    "1-speed", "2-clip", "2-clip_without_unscale", "2-clip_value", "2-step_without_scaler", "2-backward_under_autocast", "3-skip", "3-no_update",
    "4-unstable", "5-bf16_is_more_precise",
]  # fmt: skip


def grade_all(folder, cases, seconds=60.0):
    """Grade many scripts with one start of torch; each run may take some seconds."""
    specs, owners = [], []
    for name, (task, text, _) in cases.items():
        path = folder / f"{name}.py"
        path.write_text(text)
        for spec in run_specs(task, path):
            specs.append(spec)
            owners.append(name)
    with forking():
        runs = measure(specs, seconds)
    grades = {}
    for name, (task, text, _) in cases.items():
        own = [run for run, owner in zip(runs, owners, strict=True) if owner == name]
        grades[name] = judge(task, folder / f"{name}.py", text, own)
    return grades


def failed(grade):
    return {row.name for row in grade.rows if not row.passed}


def explain(grade):
    return [(row.name, row.measured) for row in grade.rows]


def assert_graded(name, grade):
    expected = CASES[name][2]
    assert grade.passed is (expected == set()), explain(grade)
    if expected is not None:
        assert failed(grade) == expected, explain(grade)
    assert all(bool(row.to_do) is not row.passed for row in grade.rows), explain(grade)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return grade_all(tmp_path_factory.mktemp("quick"), {name: CASES[name] for name in QUICK})


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    return grade_all(tmp_path_factory.mktemp("rest"), {name: CASES[name] for name in CASES if name not in QUICK})


@pytest.mark.parametrize("name", QUICK)
def test_scripts_are_graded_by_what_they_do(quick, name):
    """A right script passes; a mistake fails its own row, and only rows with a to-do fail."""
    assert_graded(name, quick[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CASES) - set(QUICK)))
def test_more_scripts_are_graded_by_what_they_do(rest, name):
    """Other styles, other mistakes, and the starter files, which are not done."""
    assert_graded(name, rest[name])


def test_clipping_scaled_gradients_is_named_as_such(quick):
    """The row reports the norm that was applied: max_norm divided by the scale."""
    row = next(row for row in quick["2-clip_without_unscale"].rows if row.name == "clipping")
    assert "the scaled gradient was clipped" in row.measured
    assert "unscale_" in row.to_do


def test_a_missing_update_is_named_as_such(quick):
    """torch's error is reported with its line and remedy."""
    row = next(row for row in quick["3-no_update"].rows if row.name == "run")
    assert "step() has already been called" in row.measured
    assert "(line " in row.measured
    assert "scaler.update()" in row.to_do


def test_an_inf_of_the_grader_is_counted(quick):
    """The three runs have different numbers of skipped steps, and the script prints each."""
    row = next(row for row in quick["3-skip"].rows if row.name == "count")
    assert row.measured == "0, 1, 3 skipped in three runs, each printed"


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_script_that_was_stopped_has_no_rows_about_its_steps(tmp_path, number):
    """What it had measured is lost, so "0 steps" would be false; the reason is the time limit."""
    path = tmp_path / "loops.py"
    path.write_text("import torch\nwhile True:\n    pass\n")
    stopped = Run("timeout", "It was stopped after 60 s.")
    grade = judge(number, path, path.read_text(), [stopped for _ in run_specs(number, path)])
    assert [row.name for row in grade.rows] == ["run", "check"]
    assert failed(grade) == {"run"}
    assert "Check that its loops end" in grade.rows[0].to_do


@pytest.mark.parametrize(
    ("library", "name"), [("accelerate", "Accelerate"), ("pytorch_lightning", "Lightning"), ("os", "")]
)
def test_advice_names_the_library_that_turned_fp16_off(tmp_path, library, name):
    """Nobody can add autocast to a loop that Accelerate or Lightning owns."""
    path = tmp_path / "owned.py"
    path.write_text(f"import torch\nfrom {library} import x\n")
    grade = judge(2, path, path.read_text(), [Run("end"), Run("end")])
    (row,) = [row for row in grade.rows if row.name == "autocast"]
    assert not row.passed
    assert row.to_do.startswith(
        f"The grader runs on the CPU, where {name} does not" if name else "Compute the forward pass"
    )


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Grades of the odd files that have code to run."""
    runs = [odd for odd in scripts.ODD if odd[1] != {"code"}]
    cases = {f"{number}-{name}": (number, text, rows) for name, rows, text in runs for number in (1, 2, 3, 4)}
    return grade_all(tmp_path_factory.mktemp("odd"), cases, seconds=3)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "rows", "text"), scripts.ODD, ids=[odd[0] for odd in scripts.ODD])
@pytest.mark.usefixtures("forked")
def test_files_that_are_no_training_scripts_fail(odd, tmp_path, number, name, rows, text):
    """Crashes, hangs, exits and empty files are graded, with no exception of the grader's."""
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    grade = grade_practice(number, path) if rows == {"code"} else odd[f"{number}-{name}"]
    assert not grade.passed
    if rows == {"autocast"} and number == 4:  # its rows are the formats
        rows = {"fp16", "bf16"}
    assert rows <= failed(grade), explain(grade)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_text_file_can_be_the_explanation(tmp_path):
    """Task 5 accepts plain text."""
    path = tmp_path / "explanation.txt"
    path.write_text(scripts.EXPLANATION.split('"""')[1])
    assert grade_practice(5, path).passed


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_readers_files_are_left_alone(tmp_path, monkeypatch):
    """What a script writes, relative to the working directory or to itself, lands elsewhere; modules next to it can be imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.txt").write_text("mine")
    (tmp_path / "settings.py").write_text("value = 7\n")
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\nimport settings\nPath('data.txt').write_text('gone')\n"
        "Path(__file__).with_name('data.txt').write_text('gone')\nprint(settings.value)\n"
    )
    (run,) = measure([RunSpec(str(script))], 60)
    assert run.fine, run.error
    assert run.output.split() == ["7"]
    assert (tmp_path / "data.txt").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"data.txt", "settings.py", "script.py"}


@pytest.mark.slow
def test_ctrl_c_ends_the_script_too(tmp_path):
    """The script is in a session of its own; the command ends it before it exits with 130."""
    script, pid = tmp_path / "sleeps.py", tmp_path / "pid"
    script.write_text(
        f"import os, time\nfrom pathlib import Path\nPath({str(tmp_path / 'new')!r}).write_text(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(pid)!r})\ntime.sleep(600)\n"
    )
    # A test run in the background ignores SIGINT, and so would its children.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from halfstep.__main__ import main; main()"
    command = [sys.executable, "-c", program, "learn", "practice", "2", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not pid.exists():
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)  # to the command alone, as `kill -INT` does
            assert process.communicate(timeout=300) == ("", "halfstep: interrupted.\n")
        finally:
            process.kill()
    assert process.returncode == 130
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid.read_text()}").exists():  # it may be a zombie for a moment
        assert time.monotonic() < deadline
        time.sleep(0.05)
