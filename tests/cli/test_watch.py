"""`halfstep watch`: a run directory or file, once, as a page, and what is said where there is no run."""

import json
import subprocess
import sys

import pytest

from halfstep.checkpoint.runlog import RunLog
from halfstep.cli import main


@pytest.fixture
def run(tmp_path):
    with RunLog.create(tmp_path / "run.jsonl", command="c", policy="bf16", truth={}, environment={}) as log:
        log.step(micro_batch=1, attempted=1, applied=1, loss=0.5)
        stats = {"numel": 4, "nan": 0, "inf": 0, "zeros": 0, "largest": 1.0, "smallest": 1.0, "exponents": {"0": 4}}
        log.event("numerics", step=1, gradients={"layer.weight": stats})
    return tmp_path


def watch(*args):
    done = subprocess.run(
        [sys.executable, "-m", "halfstep", "watch", *map(str, args)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_a_directory_and_its_run_file_show_the_same(run):
    """Outside a terminal the view is printed once."""
    of_directory, of_file = watch(run), watch(run / "run.jsonl", "--once")
    assert of_directory[1].splitlines()[1:] == of_file[1].splitlines()[1:]  # the first line has the time
    code, out, err = of_directory
    assert (code, err) == (0, "")
    assert "layer.weight" in out


def test_a_page_is_written(run):
    """One HTML file with the tensors of the sample and no script."""
    code, out, _ = watch(run, "--html", run / "page.html")
    page = (run / "page.html").read_text()
    assert code == 0
    assert "page.html" in out
    assert "layer.weight" in page
    assert "<script" not in page


def test_a_missing_run_is_one_message(tmp_path):
    """The message names the file that is missing; no traceback."""
    code, _, err = watch(tmp_path / "nothing")
    assert code == 1
    assert err.startswith("halfstep: There is no run file")
    assert "Traceback" not in err


def test_the_view_needs_no_torch(run):
    """It starts quickly: neither torch nor numpy is imported."""
    code = "import sys; from halfstep.cli import cli; cli.main(args=['watch', sys.argv[1]], standalone_mode=False); print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_summary_as_json(run):
    """The last step, and the truth table of the header while no other is there; it excludes the other outputs."""
    code, out, err = watch(run, "--json")
    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert summary["last_step"]["loss"] == 0.5
    assert (summary["truth"], summary["events"], summary["ended"]) == ({}, [], False)
    code, _, err = watch(run, "--json", "--once")
    assert code == 2
    assert "remove --html and --once" in err


def test_ctrl_c_closes_the_view_with_one_line(run, monkeypatch, capsys):
    """Exit code 130; the line states that the run is not affected."""

    def press(seconds):
        raise KeyboardInterrupt

    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    monkeypatch.setattr("time.sleep", press)
    with pytest.raises(SystemExit) as stop:
        main(["watch", str(run)])
    assert stop.value.code == 130
    assert capsys.readouterr().err == "halfstep: view closed; the run is not affected.\n"
