"""Runs on disk."""

import json
import math

import pytest

from comparison_cases import write_case
from halfstep.checkpoint.runlog import RunLog
from halfstep.comparison.record import CUT_OFF, RUNS, SURVEY, read_json, read_run, read_survey, run_files, run_name
from halfstep.comparison.remainder import read_remainder
from halfstep.comparison.result import read_comparison
from halfstep.errors import SettingError


def test_a_run_is_read_as_it_was_written(tmp_path):
    """Curves, turns, figures, skips and the row itself come back."""
    write_case(tmp_path / "c", repeats=1)
    run = read_run(tmp_path / "c" / RUNS / "fp16-0.jsonl")
    assert (run.contender.label, run.repeat, run.seed, run.failure) == ("fp16", 0, 0, None)
    assert [i + 1 for i, skipped in enumerate(run.skipped) if skipped] == [3, 5]
    assert math.isinf(run.grad_norm[2])
    assert len(run.loss) == 40
    assert [len(turn) for turn in run.slices] == list(run.settings.slices())
    assert len(run.seconds) == 30
    assert run.measured["validation"]["metric"] == 0.9
    assert run.measured["truth"]["bytes_per_parameter"] == 16


def test_a_failed_run_says_why(tmp_path):
    """Kind and reason, and no figures."""
    write_case(tmp_path / "c", failures={"bf16": {"kind": "out of memory", "reason": "tried to allocate"}}, repeats=1)
    run = read_run(tmp_path / "c" / RUNS / "bf16-0.jsonl")
    assert run.failure == {"kind": "out of memory", "reason": "tried to allocate"}
    assert (run.loss, run.slices, run.seconds) == ((), (), [])


@pytest.mark.parametrize(
    ("losses", "at", "bad"),
    [
        ((1.0, 2.0), None, 0),
        ((1.0, math.nan, 2.0), None, 1),
        ((1.0, math.nan, math.inf), 2, 2),
        ((math.nan,), 1, 1),
        ((), None, 0),
    ],
)
def test_divergence_is_a_loss_that_never_comes_back(losses, at, bad, tmp_path):
    """One bad step is a bad step; a tail of them is the end of a run."""
    import dataclasses

    write_case(tmp_path / "c", repeats=1)
    run = dataclasses.replace(read_run(tmp_path / "c" / RUNS / "fp32-0.jsonl"), loss=losses)
    assert (run.diverged_at, run.num_nonfinite) == (at, bad)


def test_files_are_named_after_rows(tmp_path):
    """Whatever a label holds, its file has a plain name; other files of the directory are left alone."""
    assert run_name("bf16-lean,states=8bit,compile=on", 2) == "bf16-lean-states=8bit-compile=on-2"
    assert "/" not in run_name("fp32,keep_fp32=a/b|*.norm", 0)
    labels = [
        "bf16,keep_fp32=a|b",
        "bf16,keep_fp32=a*b",
        "bf16,keep_fp32=a|*b",
        *(f"bf16,keep_fp32={'m|' * 200}{n}" for n in "ab"),
    ]
    names = {run_name(label, 0) for label in labels}
    assert len(names) == 5  # each run has a file of its own
    assert max(map(len, names)) < 200
    write_case(tmp_path / "c", repeats=1)
    (tmp_path / "c" / RUNS / "note.txt").write_text("mine")
    assert [p.name for p in run_files(tmp_path / "c")] == ["bf16-0.jsonl", "fp16-0.jsonl", "fp32-0.jsonl"]


def test_a_file_that_lost_its_end_is_a_failed_run(tmp_path):
    """Cut in a line or between two, it counts as a run that failed, and --resume makes it again; damage is named."""
    folder = write_case(tmp_path / "c", stopped=True)
    path = folder / RUNS / "bf16-1.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for part in (whole[: len(whole) // 2], b"".join(lines[:12]), b"".join(lines[:-1])):
        path.write_bytes(part)
        run = read_run(path)
        assert run.failure["kind"] == CUT_OFF
        assert run.slices == ()
        row = read_comparison([folder]).row("bf16")
        assert row.reason.startswith("cut off (1 of 3 runs): bf16-1.jsonl ends after step ")
        assert row.num_runs == 2
        assert ("bf16", 1) not in read_remainder(folder).done
    path.write_bytes(whole.replace(b'"skipped"', b'"skippt"'))
    with pytest.raises(SettingError, match="is damaged.*skipped"):
        read_run(path)


def test_a_survey_is_whole(tmp_path):
    """What is missing is named, for a report and for --resume alike."""
    folder = write_case(tmp_path / "c", stopped=True)
    survey = read_survey(folder)
    (folder / SURVEY).write_text(json.dumps({key: survey[key] for key in survey if key not in {"contenders", "notes"}}))
    for reader in (lambda: read_comparison([folder]), lambda: read_remainder(folder)):
        with pytest.raises(SettingError, match="lacks notes, contenders"):
            reader()


def test_foreign_files_are_refused(tmp_path):
    """A run of `halfstep train`, broken JSON, a list: each is named."""
    with RunLog.create(tmp_path / "run.jsonl", command="x", policy="fp32", truth={}, environment={}):
        pass
    with pytest.raises(SettingError, match="single run"):
        read_run(tmp_path / "run.jsonl")
    for text, message in (("{", "not JSON"), ("[]", "no JSON object")):
        (tmp_path / SURVEY).write_text(text)
        with pytest.raises(SettingError, match=message):
            read_json(tmp_path / SURVEY)
    with pytest.raises(SettingError, match="cannot be read"):
        read_json(tmp_path / "nothing")
