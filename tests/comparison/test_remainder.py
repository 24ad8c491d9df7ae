"""The rest of a stopped comparison, and resuming it."""

import json

import pytest

from comparison_cases import ENVIRONMENT, write_case
from comparison_jobs import write_job
from halfstep.comparison import compare
from halfstep.comparison.compare import resume_comparison
from halfstep.comparison.remainder import CONTINUED, check_same, read_remainder
from halfstep.comparison.runner import SilentObserver
from halfstep.comparison.survey import Survey
from halfstep.errors import SettingError


class RunCollector(SilentObserver):
    """Collects the runs that are made."""

    def __init__(self):
        self.runs, self.total = set(), 0

    def surveyed(self, survey, total_steps):
        self.total = total_steps

    def stepped(self, label, repeat, count):
        self.runs.add((label, repeat))


def stop(folder, *missing):
    """Make a finished comparison look like one that was stopped before these runs."""
    survey = json.loads((folder / "survey.json").read_text())
    (folder / "survey.json").write_text(json.dumps({**survey, "stopped": True}))
    for name in missing:
        (folder / "runs" / f"{name}.jsonl").unlink()


def cut_short(folder, name, mark='"stopped_after": 7'):
    """Make a run look as if the stop had interrupted it."""
    path = folder / "runs" / f"{name}.jsonl"
    path.write_text(path.read_text().replace('"base_bytes"', f'{mark}, "base_bytes"'))


def test_missing_and_interrupted_runs_remain(tmp_path):
    """Runs that are missing or were cut short are not done; failed ones are listed with their kind."""
    folder = write_case(tmp_path / "c", failures={"fp16": {"kind": "out of memory", "reason": "too large"}})
    stop(folder, "bf16-2")
    cut_short(folder, "fp32-1")
    cut_short(folder, "bf16-0", '"unsurveyed": true')  # trained to its end, but without the census
    remainder = read_remainder(folder)
    assert remainder.survey.labels == ("fp32", "bf16", "fp16")
    assert remainder.survey.settings.steps == 40
    everything = {(label, repeat) for label in remainder.survey.labels for repeat in range(3)}
    assert everything - remainder.done == {("bf16", 2), ("fp32", 1), ("bf16", 0)}
    assert remainder.failed == {("fp16", "out of memory")}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_comparison_counts_as_stopped_until_its_last_run_is_done(tmp_path):
    """The survey is marked as stopped from the first run on, so that a killed comparison can be resumed too."""
    marks = []

    class Reader(SilentObserver):
        def stepped(self, label, repeat, count):
            marks.append(json.loads((tmp_path / "out" / "survey.json").read_text())["stopped"])

    compare(str(write_job(tmp_path)), ["fp32"], steps=6, repeats=1, batch=8, out=tmp_path / "out", observer=Reader())
    assert marks
    assert all(marks)
    assert json.loads((tmp_path / "out" / "survey.json").read_text())["stopped"] is False


def test_nothing_to_resume_raises(tmp_path):
    """A comparison that was not stopped, one that is complete, and a directory without one raise."""
    folder = write_case(tmp_path / "c")
    with pytest.raises(SettingError, match="was not stopped"):
        read_remainder(folder)
    stop(folder)
    with pytest.raises(SettingError, match="was not stopped"):
        read_remainder(folder)
    with pytest.raises(SettingError, match="no comparison to resume"):
        read_remainder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": "another CPU"}, "machine was 'a CPU' and is 'another CPU'"),
        ({"num_params": 3}, "num_params was"),
        ({"environment": {**ENVIRONMENT, "torch": "2.9.0"}}, "torch was '2.13.0' and is '2.9.0'"),
        ({"threads": 4}, "torch had 1 threads and has 4"),
    ],
)
def test_resuming_under_other_conditions_raises(tmp_path, changes, message):
    """Rows of two machines, torch versions or jobs do not belong in one directory."""
    values = json.loads((write_case(tmp_path / "c") / "survey.json").read_text())
    survey = Survey.from_dict(values)
    check_same(survey, survey)
    with pytest.raises(SettingError, match=message):
        check_same(survey, Survey.from_dict({**values, **changes}))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_only_what_is_missing_is_run(tmp_path):
    """Finished runs stay as they are, the others are repeated, and a note says that the comparison was resumed."""
    out = tmp_path / "out"
    arguments = {"precisions": ["fp32", "bf16"], "steps": 12, "repeats": 2, "batch": 8, "warmup": 2}
    compare(str(write_job(tmp_path)), **arguments, out=out)
    before = (out / "runs" / "fp32-0.jsonl").read_bytes()
    stop(out, "bf16-1")
    cut_short(out, "fp32-1")
    collector = RunCollector()
    comparison = resume_comparison(out, observer=collector)
    assert collector.runs == {("bf16", 1), ("fp32", 1)}
    assert collector.total == 24
    assert (out / "runs" / "fp32-0.jsonl").read_bytes() == before
    assert [row.num_runs for row in comparison.rows] == [2, 2]
    assert CONTINUED in comparison.notes
    assert not any("stopped early" in note for note in comparison.notes)
    with pytest.raises(SettingError, match="was not stopped"):
        resume_comparison(out)
