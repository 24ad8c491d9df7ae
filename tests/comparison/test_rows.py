"""From runs to rows."""

import dataclasses
import math

import pytest

from comparison_cases import write_case
from halfstep.comparison.measurements import Failure, SkipCause
from halfstep.comparison.record import read_run, run_files
from halfstep.comparison.rows import METRICS, build_row, final_loss, metric_of, noise_of
from halfstep.comparison.survey import read_survey


def rows_of(folder):
    runs = [read_run(path) for path in run_files(folder)]
    survey = read_survey(folder)
    groups = {label: [r for r in runs if r.variant.label == label] for label in survey.labels}
    return {label: build_row(group, groups["fp32"], survey, label) for label, group in groups.items()}


def test_speed_memory_and_loss_are_against_the_reference(tmp_path):
    """Speedup, memory ratio, loss gap and FLOP share are relative to fp32 and to the matmul rate."""
    case = (("fp32", 0.010, {}), ("bf16", 0.005, {"gap": 0.1, "peak": 300 * 2**20}))
    rows = rows_of(write_case(tmp_path / "c", case))
    row = rows["bf16"]
    assert row.speedup.value == pytest.approx(2, rel=0.02)
    assert row.speedup.low > 1.9
    assert row.samples_per_second.value == pytest.approx(64 / 0.005, rel=0.02)
    assert row.memory_ratio == pytest.approx(0.75)
    assert row.loss_gap.value == pytest.approx(0.095, abs=0.002)
    assert row.beyond_noise is True
    assert row.flops_share == pytest.approx(47e6 / 0.005 / 100e9, rel=0.02)
    assert (rows["fp32"].speedup.value, rows["fp32"].loss_gap.value) == (1, 0)


def cut(folder, label, steps):
    """Cut runs of a row short: the number of steps of each repeat, None for all of them."""
    for repeat, count in enumerate(steps):
        if count is None:
            continue
        path = folder / "runs" / f"{label}-{repeat}.jsonl"
        lines = path.read_text().splitlines()
        beyond = [line for line in lines if '"kind":"step"' in line][count:]
        path.write_text("".join(f"{line}\n" for line in lines if line not in beyond))


def test_a_row_that_was_cut_short_has_its_step(tmp_path):
    """Loss and metric are those of the longest runs; the step is given only where no run got to the end."""
    folder = write_case(tmp_path / "c")
    full = rows_of(folder)["bf16"]
    cut(folder, "bf16", [None, 12, None])
    row = rows_of(folder)["bf16"]
    assert (full.cut_at, row.cut_at) == (None, None)
    assert (row.loss.count, row.metric.count) == (2, 2)  # the run that was cut short is not averaged with the others
    cut(folder, "bf16", [20, 12, 20])
    row = rows_of(folder)["bf16"]
    assert (row.cut_at, row.loss.count, row.as_dict()["cut_at"]) == (20, 2, 20)
    assert row.loss.value > full.loss.value
    assert row.metric_gap is None  # the reference has it at another step
    assert row.loss_gap.value == pytest.approx(0)  # both at step 20


def test_a_failed_row_has_the_loss_of_its_last_step(tmp_path):
    """A run that was stopped by skipped steps shows how far it got."""
    folder = write_case(tmp_path / "c")
    cut(folder, "fp16", [30, 30, 30])
    for path in folder.glob("runs/fp16-*.jsonl"):
        with path.open("a") as file:
            file.write('{"kind": "event", "event": "failed", "failure": "overflow", "reason": "30 steps in a row"}\n')
    row = rows_of(folder)["fp16"]
    assert (row.status, row.cut_at) == ("failed", 30)
    assert row.loss is not None


def test_validation_is_timed_and_the_gpu_peak_is_predicted(tmp_path):
    """Seconds and examples per second; on a CPU the predicted peak of a stated GPU, apart from the process's memory."""
    row = rows_of(write_case(tmp_path / "c"))["bf16"]
    assert (row.val_seconds, row.val_samples_per_second) == (0.5, 720)
    assert (row.predicted_bytes, row.predicted_gpu) == (70 << 20, "A100 40GB")
    assert row.predicted_parts == {"weights": 6 << 20, "workspaces": 64 << 20}
    assert "process" in row.memory
    assert metric_of(row, "predicted_gib") == pytest.approx(70 / 1024)


def test_a_small_gap_is_within_noise(tmp_path):
    """A gap of a hundredth of the difference between seeds is not beyond noise."""
    case = (("fp32", 0.010, {}), ("bf16", 0.010, {"gap": 0.0002}))
    row = rows_of(write_case(tmp_path / "c", case, noise=0.05))["bf16"]
    assert row.beyond_noise is False
    assert row.loss_distance < 0.001


def test_a_slow_machine_in_one_round_does_not_change_a_ratio(tmp_path):
    """If all rows are three times slower in the last repeat, the speedup stays 2 although the times vary."""
    case = (("fp32", 0.010, {}), ("bf16", 0.005, {}))
    rows = rows_of(write_case(tmp_path / "c", case, drift=lambda repeat: 3.0 if repeat == 2 else 1.0))
    assert rows["bf16"].speedup.low == pytest.approx(2, rel=0.03)
    assert rows["bf16"].speedup.high == pytest.approx(2, rel=0.03)
    assert rows["bf16"].step_seconds.high > 0.010


def test_one_repeat_has_no_noise_estimate(tmp_path):
    """Without a second seed the noise is None."""
    row = rows_of(write_case(tmp_path / "c", repeats=1))["bf16"]
    assert (row.beyond_noise, row.loss_noise) == (None, None)


def test_memory_is_split_by_category(tmp_path):
    """The categories add up to the peak."""
    row = rows_of(write_case(tmp_path / "c"))["fp32"]
    assert sum(row.memory.values()) == row.peak_bytes
    assert list(row.memory) == ["process", "weights", "gradients", "optimizer", "activations, rest"]


def test_jobs_that_are_not_deterministic_have_no_gap(tmp_path):
    """Losses from different weights or batches are not compared, speed is."""
    row = rows_of(write_case(tmp_path / "c", same_batches=False))["bf16"]
    assert (row.loss_gap, row.loss_distance, row.beyond_noise) == (None, None, None)
    assert row.speedup is not None


def test_failures_are_rows_with_a_reason(tmp_path):
    """A run that never started has no figures, but its kind and reason."""
    folder = write_case(tmp_path / "c", failures={"bf16": {"kind": "out of memory", "reason": "CUDA out of memory."}})
    row = rows_of(folder)["bf16"]
    assert (row.status, row.step_seconds, row.num_runs) == ("failed", None, 0)
    assert row.reason == "out of memory (3 of 3 runs): CUDA out of memory."
    assert all(metric_of(row, name) in {None, 0} for name in METRICS)


def test_a_nan_is_a_failure_with_its_step(tmp_path):
    """The row keeps its timing, and the reason has the first step of the non-finite tail."""
    folder = write_case(tmp_path / "c", repeats=2)
    runs = [read_run(path) for path in run_files(folder)]
    mine = [r for r in runs if r.variant.label == "bf16"]
    mine[1] = dataclasses.replace(mine[1], loss=(*mine[1].loss[:20], *([math.nan] * 20)))
    row = build_row(mine, [r for r in runs if r.variant.label == "fp32"], read_survey(folder), "bf16")
    assert row.status == "failed"
    assert "from step 21 on with seed 1" in row.reason
    assert row.nonfinite == 20
    assert row.step_seconds is not None
    assert final_loss(mine[1]) is None
    assert (row.loss, row.loss_gap) == (None, None)  # the mean of the other seed would hide it


def test_figures_of_gates_are_plain_numbers(tmp_path):
    """Every metric is a number for a row that completed."""
    case = (("fp32", 0.010, {}), ("fp16", 0.006, {}), ("fp16,compile=on", 0.006, {"scaled": True, "skips": (3, 5)}))
    row = rows_of(write_case(tmp_path / "c", case))["fp16,compile=on"]
    figures = {name: metric_of(row, name) for name in METRICS}
    assert all(isinstance(value, int | float) for value in figures.values())
    assert (figures["gradient_error"], figures["eager_error"]) == (0.01, 0.003)
    assert figures["skips"] == 6
    assert figures["step_ms"] == pytest.approx(6, rel=0.05)
    assert figures["mean_step_ms"] == pytest.approx(6, rel=0.05)
    assert figures["memory_gib"] == pytest.approx(400 / 1024)


def test_a_run_that_diverged_has_the_cause_that_was_examined(tmp_path):
    """The reason of the row names it, after a NaN and after a hard stop; a scale that was too high is no such cause."""
    folder = write_case(tmp_path / "c", repeats=1)
    runs = {run.variant.label: run for run in map(read_run, run_files(folder))}
    for is_scale, words in ((False, ": head overflowed"), (True, "")):
        causes = (SkipCause(1, "forward", "head", "head overflowed.", 1.0, is_scale),)
        measured = dataclasses.replace(runs["fp16"].measured, skip_causes=causes)
        run = dataclasses.replace(runs["fp16"], loss=(math.nan,) * 40, measured=measured)
        row = build_row([run], [runs["fp32"]], read_survey(folder), "fp16")
        assert row.reason == f"NaN (1 of 1 runs): the loss is not finite from step 1 on with seed 0{words}"
        stopped = dataclasses.replace(run, failure=Failure("overflow", "25 steps in a row were skipped."))
        reason = build_row([stopped], [runs["fp32"]], read_survey(folder), "fp16").reason
        assert reason.endswith("were skipped." if is_scale else "were skipped. Examined: head overflowed.")


def test_a_slow_step_moves_the_mean_and_not_the_median(tmp_path):
    """With one slow step per turn, the mean rises and the median does not."""
    folder = write_case(tmp_path / "c", repeats=1)
    (run,) = (r for p in run_files(folder) if (r := read_run(p)).variant.label == "fp32")
    slices = tuple((3 * turn[0], *turn[1:]) for turn in run.slices)
    slowed = dataclasses.replace(run, slices=slices)
    row = build_row([slowed], [run], read_survey(folder), "fp32")
    assert row.mean_seconds == pytest.approx(sum(slowed.seconds) / len(slowed.seconds))
    assert row.mean_seconds > 1.1 * row.step_seconds.value
    assert row.step_seconds.value == pytest.approx(
        build_row([run], [run], read_survey(folder), "fp32").step_seconds.value, rel=0.02
    )


def test_noise_is_the_mean_distance_of_seeds(tmp_path):
    """Two seeds have a distance, one seed has none."""
    runs = [read_run(p) for p in run_files(write_case(tmp_path / "c", repeats=2)) if "fp32" in p.name]
    assert noise_of(runs) > 0
    assert noise_of(runs[:1]) is None
