"""What is left of a comparison that was stopped, and finishing it."""

import json

import pytest

from comparison_cases import ENVIRONMENT, write_case
from comparison_jobs import write_job
from halfstep.comparison import compare
from halfstep.comparison.compare import go_on
from halfstep.comparison.conductor import Quiet
from halfstep.comparison.remainder import CONTINUED, check_same, read_remainder
from halfstep.errors import SettingError


class Witness(Quiet):
    """Notes the runs that are made."""

    def __init__(self):
        self.runs, self.total = set(), 0

    def surveyed(self, found, total_steps):
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
    """Make a run look as if the stop had met it in the middle."""
    path = folder / "runs" / f"{name}.jsonl"
    path.write_text(path.read_text().replace('"base_bytes"', f'{mark}, "base_bytes"'))


def test_missing_and_shortened_runs_are_left(tmp_path):
    """Rows and settings are the survey's; a run that was cut short is not done; failures are told."""
    folder = write_case(tmp_path / "c", failures={"fp16": {"kind": "out of memory", "reason": "no room"}})
    stop(folder, "bf16-2")
    cut_short(folder, "fp32-1")
    cut_short(folder, "bf16-0", '"unsurveyed": true')  # trained to its end, but its operators were not looked at
    left = read_remainder(folder)
    assert [c.label for c in left.contenders] == ["fp32", "bf16", "fp16"]
    assert left.settings.steps == 40
    everything = {(c.label, repeat) for c in left.contenders for repeat in range(3)}
    assert everything - left.done == {("bf16", 2), ("fp32", 1), ("bf16", 0)}
    assert left.failed == {("fp16", "out of memory")}


def test_a_comparison_is_stopped_until_its_last_run_is_done(tmp_path):
    """The survey says so from the first run on: a comparison that is killed can be finished like one that was stopped."""
    seen = []

    class Reader(Quiet):
        def stepped(self, label, repeat, count):
            seen.append(json.loads((tmp_path / "out" / "survey.json").read_text())["stopped"])

    compare(str(write_job(tmp_path)), ["fp32"], steps=6, repeats=1, batch=8, out=tmp_path / "out", watcher=Reader())
    assert seen
    assert all(seen)
    assert json.loads((tmp_path / "out" / "survey.json").read_text())["stopped"] is False


def test_nothing_left_is_refused(tmp_path):
    """A comparison that was not stopped, one that is whole all the same, and a directory without one."""
    folder = write_case(tmp_path / "c")
    with pytest.raises(SettingError, match="was not stopped"):
        read_remainder(folder)
    stop(folder)
    with pytest.raises(SettingError, match="was not stopped"):
        read_remainder(folder)
    with pytest.raises(SettingError, match="holds no comparison to go on with"):
        read_remainder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": "another CPU"}, "machine was 'a CPU' and is 'another CPU'"),
        ({"num_params": 3}, "num_params was"),
        ({"environment": {**ENVIRONMENT, "torch": "2.9.0"}}, "torch was 2.13.0 and is 2.9.0"),
        ({"threads": 4}, "torch had 1 threads and has 4"),
    ],
)
def test_another_machine_is_refused(tmp_path, changes, message):
    """Rows of two machines, of two versions of torch or of two jobs do not belong in one directory."""
    survey = json.loads((write_case(tmp_path / "c") / "survey.json").read_text())
    check_same(survey, survey)
    with pytest.raises(SettingError, match=message):
        check_same(survey, {**survey, **changes})


def test_only_what_is_missing_is_run(tmp_path):
    """The runs that are done stay as they are, the others are made, and the result says that it was continued."""
    out = tmp_path / "out"
    given = {"precisions": ["fp32", "bf16"], "steps": 12, "repeats": 2, "batch": 8, "warmup": 2}
    compare(str(write_job(tmp_path)), **given, out=out)
    kept = (out / "runs" / "fp32-0.jsonl").read_bytes()
    stop(out, "bf16-1")
    cut_short(out, "fp32-1")
    witness = Witness()
    comparison = go_on(out, watcher=witness)
    assert witness.runs == {("bf16", 1), ("fp32", 1)}
    assert witness.total == 24
    assert (out / "runs" / "fp32-0.jsonl").read_bytes() == kept
    assert [row.num_runs for row in comparison.rows] == [2, 2]
    assert CONTINUED in comparison.notes
    assert not any("stopped early" in note for note in comparison.notes)
    with pytest.raises(SettingError, match="was not stopped"):
        go_on(out)
