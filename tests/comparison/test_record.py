"""Runs on disk."""

import dataclasses
import json
import math

import pytest

from comparison_cases import write_case
from halfstep.checkpoint.runlog import RunLog, read_runlog
from halfstep.comparison.measurements import Failure
from halfstep.comparison.record import CUT_OFF, RUNS, read_run, run_files, run_name
from halfstep.comparison.remainder import read_remainder
from halfstep.comparison.result import read_comparison
from halfstep.comparison.table import table_cells
from halfstep.errors import SettingError
from halfstep.report.numerics.view import view_of
from halfstep.report.page import page_values


def test_a_run_is_read_as_it_was_written(tmp_path):
    """Variant, curves, turns, skips and measurements are read back."""
    write_case(tmp_path / "c", repeats=1)
    run = read_run(tmp_path / "c" / RUNS / "fp16-0.jsonl")
    assert (run.variant.label, run.repeat, run.seed, run.failure) == ("fp16", 0, 0, None)
    assert [i + 1 for i, skipped in enumerate(run.skipped) if skipped] == [3, 5]
    assert math.isinf(run.grad_norm[2])
    assert len(run.loss) == 40
    assert [len(turn) for turn in run.slices] == list(run.settings.slices())
    assert len(run.seconds) == 30
    assert run.measured.validation.metric == 0.9
    assert run.measured.truth["bytes_per_parameter"] == 16


def test_the_sample_of_a_run_is_in_its_file(tmp_path):
    """As an event that `halfstep watch` shows too: the view of the file has the tensors of the sample."""
    write_case(tmp_path / "c", repeats=1)
    path = tmp_path / "c" / RUNS / "fp16-0.jsonl"
    (stats,) = read_run(path).sample["gradients"].values()
    assert (stats["numel"], stats["zeros"], stats["largest"]) == (60, 30, 0.5)
    view = view_of(read_runlog(path))
    assert (view.ended, view.events) == (True, ())
    (row,) = view.rows
    assert (row.name, row.kind) == ("blocks.1.fc.weight", "gradient")
    assert row.flushed == pytest.approx(5 / 30)  # 2^-26 to 2^-30


def test_a_file_without_numerics_is_read(tmp_path):
    """Comparisons of earlier versions have neither samples nor causes: rows, table and page show nothing for them."""
    folder = write_case(tmp_path / "c", repeats=1)
    for path in run_files(folder):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [line for line in lines if line.get("event") != "numerics"]
        for line in lines:
            for name in ("numerics", "skip_causes", "numerics_failed"):
                line.get("values", {}).pop(name, None)
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    comparison = read_comparison([folder])
    assert all(row.underflow is None and row.worst_layer is None for row in comparison.rows)
    assert comparison.as_dict()["samples"] == []
    assert not {"underflow", "worst layer"} & set(table_cells(comparison.rows)[0])
    assert page_values(comparison, comparison.as_dict())["samples"] == []


def test_a_failed_run_has_its_reason(tmp_path):
    """Kind and reason are read back, and there are no curves."""
    write_case(tmp_path / "c", failures={"bf16": {"kind": "out of memory", "reason": "tried to allocate"}}, repeats=1)
    run = read_run(tmp_path / "c" / RUNS / "bf16-0.jsonl")
    assert run.failure == Failure("out of memory", "tried to allocate")
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
def test_divergence_is_a_non_finite_tail(losses, at, bad, tmp_path):
    """One bad step is only counted; a run has diverged if its last losses are not finite."""
    write_case(tmp_path / "c", repeats=1)
    run = dataclasses.replace(read_run(tmp_path / "c" / RUNS / "fp32-0.jsonl"), loss=losses)
    assert (run.diverged_at, run.num_nonfinite) == (at, bad)


def test_files_are_named_after_rows(tmp_path):
    """Every label has a unique portable file name; other files of the directory are ignored."""
    assert run_name("bf16-lean,states=8bit,compile=on", 2) == "bf16-lean-states=8bit-compile=on-2"
    assert "/" not in run_name("fp32,keep_fp32=a/b|*.norm", 0)
    labels = [
        "bf16,keep_fp32=a|b",
        "bf16,keep_fp32=a*b",
        "bf16,keep_fp32=a|*b",
        *(f"bf16,keep_fp32={'m|' * 200}{n}" for n in "ab"),
    ]
    names = {run_name(label, 0) for label in labels}
    assert len(names) == 5
    assert max(map(len, names)) < 200
    write_case(tmp_path / "c", repeats=1)
    (tmp_path / "c" / RUNS / "note.txt").write_text("mine")
    assert [p.name for p in run_files(tmp_path / "c")] == ["bf16-0.jsonl", "fp16-0.jsonl", "fp32-0.jsonl"]


def test_a_truncated_file_is_a_failed_run(tmp_path):
    """Cut in a line or between two, the run counts as failed and --resume repeats it; a damaged line is an error."""
    folder = write_case(tmp_path / "c", stopped=True)
    path = folder / RUNS / "bf16-1.jsonl"
    complete = path.read_bytes()
    lines = complete.splitlines(keepends=True)
    for part in (complete[: len(complete) // 2], b"".join(lines[:12]), b"".join(lines[:-1])):
        path.write_bytes(part)
        run = read_run(path)
        assert run.failure.kind == CUT_OFF
        assert run.slices == ()
        row = read_comparison([folder]).row("bf16")
        assert row.reason.startswith("cut off (1 of 3 runs): bf16-1.jsonl ends after step ")
        assert row.num_runs == 2
        assert ("bf16", 1) not in read_remainder(folder).done
    path.write_bytes(complete.replace(b'"skipped"', b'"skippt"'))
    with pytest.raises(SettingError, match="is damaged.*skipped"):
        read_run(path)


def test_the_file_of_a_single_run_is_rejected(tmp_path):
    """A run of `halfstep train` is not part of a comparison."""
    with RunLog.create(tmp_path / "run.jsonl", command="x", policy="fp32", truth={}, environment={}):
        pass
    with pytest.raises(SettingError, match="single run"):
        read_run(tmp_path / "run.jsonl")
