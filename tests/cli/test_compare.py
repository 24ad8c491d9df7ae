"""`halfstep compare` at the command line; what runs is in tests/comparison."""

import json

import click
import pytest
from click.testing import CliRunner

from comparison_cases import write_case
from comparison_jobs import write_job
from halfstep.cli import cli
from halfstep.errors import HalfstepError
from halfstep.report import page


def run(*args):
    return CliRunner().invoke(cli, ["compare", *map(str, args)])


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    """Without plotly's four megabytes; tests/report looks at the whole."""
    monkeypatch.setattr(page, "_plotly_script", lambda: "")


@pytest.mark.usefixtures("forked")
def test_a_job_is_compared_and_reported(tmp_path):
    """Table and verdict on stdout, progress on stderr, report and figures on disk; the gate decides the exit code."""
    out = tmp_path / "out"
    words = (write_job(tmp_path), "-p", "fp32", "-p", "bf16", "--steps", 12, "--repeats", 1, "--batch", 8, "--out", out)
    result = run(*words, "--set", "seed=3", "--fail-if", "bf16.loss_gap > 5")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "samples/s" in result.stdout
    assert "passed: fail if bf16.loss_gap > 5" in result.stdout
    assert "repeat 1 of 1" in result.stderr
    values = json.loads((out / "comparison.json").read_text())
    assert [row["label"] for row in values["rows"]] == ["fp32", "bf16"]
    assert {curve["seed"] for curve in values["curves"]} == {3}
    assert "job.py: 2 precisions compared" in (out / "report.html").read_text()
    again = run(*words)
    assert isinstance(again.exception, HalfstepError)
    assert "--force" in str(again.exception)


def test_a_report_is_rebuilt_from_run_files(tmp_path):
    """--from writes the report in place without running anything, and replaces one only with --force."""
    folder = write_case(tmp_path / "c")
    result = run("--from", folder)
    assert result.exit_code == 0, result.output
    assert (folder / "report.html").exists()
    assert "Use bf16 here" in result.stdout
    assert isinstance(run("--from", folder).exception, HalfstepError)
    assert run("--from", folder, "--force").exit_code == 0
    assert run("--from", folder, "--out", tmp_path / "other").exit_code == 0
    assert (tmp_path / "other" / "report.html").exists()


def test_hours_at_the_measured_speed(tmp_path):
    """--epochs prints the hours and the cost of every row; without the number of examples it is an error."""
    folder = write_case(tmp_path / "c")
    words = ("--from", folder, "--force", "--epochs", 2, "--price", 3)
    result = run(*words, "--examples", 3600)
    assert result.exit_code == 0, result.output
    assert "for 2 epochs of 3,600 examples" in result.stdout
    assert "cost" in result.stdout
    values = json.loads(run(*words, "--examples", 3600, "--json").stdout)["hours"]
    for row in values["rows"].values():
        assert row["gpu_hours"] == pytest.approx(2 / row["examples_per_second"])
        assert row["cost"] == pytest.approx(3 * row["gpu_hours"])
    assert values["rows"].keys() >= {"fp32", "bf16"}
    assert "--examples" in str(run(*words).exception)


def test_a_report_never_replaces_the_runs_it_is_made_of(tmp_path):
    """--out may be the one directory that is read, where --force replaces only the report; one of several is rejected."""
    one, two = (write_case(tmp_path / name, machine=name) for name in ("a", "b"))
    files = sorted(one.rglob("*"))
    assert run("--from", one, "--out", one / ".." / "a").exit_code == 0
    assert isinstance(run("--from", one, "--out", one).exception, HalfstepError)
    assert run("--from", one, "--out", one, "--force").exit_code == 0
    assert set(files) < set(one.rglob("*"))
    rejected = run("--from", one, two, "--out", two, "--force")
    assert "one of the directories that --from reads" in str(rejected.exception)
    assert len(list((two / "runs").iterdir())) == 9


def test_runs_of_different_machines_are_compared(tmp_path, monkeypatch):
    """Several directories, by --from or after it; written to a new one."""
    monkeypatch.chdir(tmp_path)
    one, two = (write_case(tmp_path / name, machine=name) for name in ("a", "b"))
    result = run("--from", one, two, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert len(values["rows"]) == 6
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_failed_gate_is_exit_code_3(tmp_path):
    """A failed gate exits with 3 after the report is written."""
    folder = write_case(tmp_path / "c")
    result = run("--from", folder, "--fail-if", "bf16.speedup > 1", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["gates"][0]["failed"] is True
    assert (folder / "report.html").exists()


@pytest.mark.usefixtures("forked")
def test_nothing_completed_is_exit_code_1(tmp_path):
    """A comparison without a completed run is a failure."""
    folder = write_case(tmp_path / "c", (("fp32", 0.1, {}),), failures={"fp32": {"kind": "job", "reason": "broken"}})
    result = run("--from", folder)
    assert result.exit_code == 1
    assert "broken" in result.stdout


def test_without_plotly_the_values_are_still_written(tmp_path, monkeypatch):
    """--from without plotly writes comparison.json and prints how to get the report later."""
    from halfstep.errors import MissingError

    def missing():
        raise MissingError("The HTML report needs plotly.")

    monkeypatch.setattr(page, "_plotly_script", missing)
    folder = write_case(tmp_path / "c")
    result = run("--from", folder)
    assert result.exit_code == 0
    assert f"halfstep compare --from {folder}" in result.stderr
    assert (folder / "comparison.json").exists()
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--from", "{tmp}"], "There is no comparison in"),
        (["digits", "-p", "bf61"], "Did you mean 'bf16'"),
        (["digits", "--peer", "apex"], "torch-amp, accelerate, fabric"),
        (["digits", "--steps", "1", "--out", "{tmp}/o"], "steps=1"),
        (["digits", "--steps", "5", "--set", "steps=6"], "set twice"),
        (["digits", "--set", "nothing=1"], "Unknown setting"),
        (["digits", "--fail-if", "bf16.los > 1"], "Did you mean 'loss'"),
        (["digitz", "--out", "{tmp}/o"], "digits"),
        (["--resume", "{tmp}"], "no comparison to resume"),
        (["digits", "--out", "{tmp}/a-file/out"], "a-file/out/runs cannot be read or written: Not a directory"),
        (["--from", "{tmp}/case", "--out", "{tmp}/a-file/out"], "cannot be read or written: Not a directory"),
        (["--from", "{tmp}/case"], "report.html cannot be read or written: Is a directory"),
    ],
)
def test_bad_input_is_one_message(args, message, tmp_path):
    """Each mistake is a HalfstepError that explains what to do."""
    (tmp_path / "a-file").write_text("")
    if any("case" in word for word in args):
        (write_case(tmp_path / "case") / "report.html").mkdir()
        args = [*args, "--force"]
    result = run(*[a.format(tmp=tmp_path) for a in args])
    assert isinstance(result.exception, HalfstepError), result.output
    assert message in str(result.exception)


@pytest.mark.parametrize(
    "args",
    [
        ["a", "b"], ["--from", "x", "--steps", "3"], ["--from", "x", "-p", "fp32"], ["--resume", "x", "digits"],
        ["--resume", "x", "--from", "y"], ["--resume", "x", "--repeats", "5"], ["--resume", "x", "--force"],
    ],
)  # fmt: skip
def test_contradictions_are_usage_errors(args):
    """Two targets, settings for completed runs, or other settings for a resumed comparison are usage errors."""
    result = run(*args)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit | click.UsageError)


def test_several_processes_are_rejected_by_name(tmp_path, monkeypatch):
    """Under torchrun each process would run the whole comparison."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    result = run("digits", "--steps", 1, "--out", tmp_path / "out")
    assert "torchrun started 2 processes (this is rank 1)" in str(result.exception)
    assert not (tmp_path / "out").exists()
