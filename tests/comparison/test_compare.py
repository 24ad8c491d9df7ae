"""`halfstep.compare()`, up to where processes start."""

import dataclasses
import signal
import sys
import types

import pytest

from comparison_jobs import write_job
from halfstep.comparison import compare as public
from halfstep.comparison.compare import _command, compare, new_folder, prepare_out, target_of
from halfstep.comparison.process import INSIDE
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.variant import parse_variants
from halfstep.errors import HalfstepError, SettingError
from halfstep.jobs.targets import load_target
from halfstep.train.stop import StopRequest


@pytest.fixture
def job(tmp_path):
    """A job that is not a variable of any module."""
    return dataclasses.replace(load_target(str(write_job(tmp_path))).job)


def test_a_job_is_sent_by_its_name(job, monkeypatch):
    """A module-level variable of a module or of the running script becomes a target; anything else raises."""
    module = types.ModuleType("a_module_of_mine")
    module.mine = job
    monkeypatch.setitem(sys.modules, "a_module_of_mine", module)
    assert target_of(job) == "a_module_of_mine:mine"
    script = types.ModuleType("__main__")
    script.__file__, script.mine = "/somewhere/script.py", job
    monkeypatch.delitem(sys.modules, "a_module_of_mine")
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert target_of(job) == "/somewhere/script.py:mine"
    del script.mine
    with pytest.raises(SettingError, match="not a module-level variable"):
        target_of(job)


def test_a_job_out_of_a_file_is_sent_by_its_file(tmp_path):
    """A job that load_target loaded is sent as its file and name."""
    path = write_job(tmp_path)
    assert target_of(load_target(str(path)).job) == f"{path}:job"


def test_a_file_that_compares_itself_raises(monkeypatch):
    """A child that loads a script without the guard does not start children."""
    monkeypatch.setenv(INSIDE, "1")
    with pytest.raises(SettingError, match='if __name__ == "__main__":'):
        compare("digits")


def test_nothing_is_overwritten_without_force(tmp_path):
    """A non-empty directory raises; `force` removes the files of a comparison and nothing else."""
    out = tmp_path / "out"
    prepare_out(out, force=False)
    (out / "runs").mkdir(parents=True)
    for name in ("report.html", "survey.json", "runs/fp32-0.jsonl", "runs/fp32-0.log", "mine.txt", "runs/mine.csv"):
        (out / name).write_text("x")
    with pytest.raises(SettingError, match="--force"):
        prepare_out(out, force=False)
    assert (out / "report.html").exists()
    prepare_out(out, force=True)
    assert sorted(p.name for p in out.rglob("*") if p.is_file()) == ["mine.csv", "mine.txt"]
    with pytest.raises(SettingError, match="is a file"):
        prepare_out(out / "mine.txt", force=True)


def test_force_leaves_a_directory_without_a_comparison_alone(tmp_path):
    """Files of a project's own runs/ are not removed, whatever their names."""
    (tmp_path / "runs").mkdir()
    for name in ("runs/weights.safetensors", "runs/train.jsonl", "report.html"):
        (tmp_path / name).write_text("mine")
    prepare_out(tmp_path, force=True)
    assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precisions": ["bf61"]}, "Did you mean 'bf16'"),
        ({"stepz": 3}, "no setting 'stepz'.*steps"),
        ({"steps": 1}, "steps=1"),
        ({"fail_if": ["bf17.loss > 1"]}, "unknown row 'bf17'"),
        ({"out": "{tmp}"}, "is not empty"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(arguments, message, tmp_path):
    """Each mistake is one error, and no directory is created."""
    (tmp_path / "there").write_text("x")
    if "out" in arguments:
        arguments = {"out": tmp_path}
    with pytest.raises(SettingError, match=message):
        public("digits", **arguments)


def test_a_single_string_is_a_list_of_one(tmp_path):
    """A string is one precision, peer or gate, not a list of characters."""
    for arguments, message in (
        ({"precisions": "bf61"}, "Unknown precision 'bf61'"),
        ({"peers": "apex"}, "Unknown peer 'apex'"),
        ({"fail_if": "bf17.loss > 1"}, "unknown row 'bf17'"),
    ):
        with pytest.raises(SettingError, match=message):
            public("digits", out=tmp_path / "out", **arguments)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SettingError), (signal.SIGINT, KeyboardInterrupt)])
def test_a_stop_before_anything_was_measured_leaves_nothing(tmp_path, monkeypatch, number, error):
    """The output directory is removed, so that the same command works again; Ctrl-C is passed on as what it is."""
    start = StopRequest.__enter__
    monkeypatch.setattr(StopRequest, "__enter__", lambda stop: (setattr(stop, "signal", number), start(stop))[1])
    with pytest.raises(error, match="stopped before anything was measured"):
        public(str(write_job(tmp_path)), ["fp32"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_repeats_the_comparison(monkeypatch):
    """It lists rows, peers and every non-default setting, quoted for a shell."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = parse_variants(["fp32", "bf16,keep_fp32=head|*.norm"], ["torch-amp:fp16"])
    words = _command(rows, CompareSettings(steps=5, max_norm=None), "job.py", "data dir")
    assert " ".join(words) == (
        "OMP_NUM_THREADS=1 halfstep compare job.py --precision fp32 --precision 'bf16,keep_fp32=*.norm|head' --peer torch-amp:fp16 "
        "--steps 5 --repeats 3 --data 'data dir' --set max_norm=none"
    )


def test_a_new_folder_is_named_after_the_target():
    """The name has only portable characters and lies under runs/."""
    assert new_folder("some/job.py:other").parent.name == "runs"
    assert new_folder("some/job.py:other").name.startswith("compare-job.py-other-")
    assert new_folder(None).name.startswith("compare-digits-")


@pytest.mark.usefixtures("forked")
def test_a_job_that_fails_at_once_leaves_no_directory_behind(tmp_path):
    """A faulty job raises before training, and the same command works again."""
    job = write_job(tmp_path)
    text = job.read_text()
    job.write_text(
        text + "\njob = halfstep.Job(model=job.model, data=lambda: [], loss=job.loss, optimizer=job.optimizer)\n"
    )
    for _ in range(2):
        with pytest.raises(HalfstepError, match="gave no batches"):
            compare(str(job), ["fp32"], steps=4, repeats=1, batch=8, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
