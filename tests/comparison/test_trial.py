"""One run, in this process."""

import math

import pytest
import torch

from comparison_jobs import write_job
from halfstep.comparison.contender import parse_contenders
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import TrialSpec
from halfstep.comparison.trial import Trial, batch_size_of
from halfstep.jobs.targets import load_target

SETTINGS = CompareSettings(steps=16, batch=8, warmup=4)


@pytest.fixture
def job(tmp_path):
    return load_target(str(write_job(tmp_path))).job


def run(job, precision, *, survey=True, gradients=None, reference=False, seed=0, finish=True):
    (contender,) = parse_contenders([], [precision]) if precision == "torch-amp" else parse_contenders([precision])
    trial = Trial(job, TrialSpec(contender, SETTINGS, seed, 8, survey, gradients, reference))
    trial.warm_up()
    for count in SETTINGS.slices():
        trial.run_slice(count)
    if finish:
        trial.finish()
    trial.loop.close()
    return trial


def test_a_run_measures_everything_once(job):
    """Every timed step has a time, every step a loss; peak, parts, phases, census and validation are there."""
    trial = run(job, "bf16")
    record, curves = trial.record, trial.curves()
    assert len(trial.seconds) == 12
    assert sum(trial.slices) == 12
    assert len(curves["loss"]) == 16
    assert all(map(math.isfinite, curves["loss"]))
    assert set(record["split"]) == {"data", "forward", "backward", "step"}
    assert record["census"]["products"] == {"bf16": pytest.approx(1)}
    assert record["held"] == {"weights": 161 * 4, "gradients": 161 * 4, "optimizer": pytest.approx(161 * 8, rel=0.05)}
    assert record["peak_bytes"] >= record["base_bytes"] > 0
    assert set(record["validation"]) == {"loss", "metric"}
    assert record["warmup_steps"] == 4
    assert record["truth"]["rows"]["precision"] == "bf16"
    assert record["samples"] == 8


def test_a_schedule_that_is_planned_for_the_run_does_not_end_it(job):
    """OneCycleLR raises beyond its total_steps, and what is measured after training takes further steps."""
    import dataclasses

    whole = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=SETTINGS.steps)  # noqa: E731
    for row in ("fp32", "torch-amp"):
        record = run(dataclasses.replace(job, scheduler=whole), row).record
        assert {"split", "census", "validation"} < set(record)


def test_validation_ends_though_its_data_does_not(job):
    """Of data without a length as many batches as there are steps are taken; a shorter generator is taken whole."""
    import dataclasses
    import itertools

    def endless(batch_size):
        while True:
            yield torch.ones(batch_size, 8), torch.ones(batch_size, 1)

    record = run(dataclasses.replace(job, data=endless), "fp32", survey=False).record
    assert record["validation_cut"] == SETTINGS.steps
    assert math.isfinite(record["validation"]["loss"])
    short = dataclasses.replace(job, data=lambda batch_size: itertools.islice(endless(batch_size), 5))
    assert "validation_cut" not in run(short, "fp32", survey=False).record


def test_what_fails_after_training_does_not_cost_the_run(job, monkeypatch):
    """The phases of a step are worth a note, not the run."""
    monkeypatch.setattr(Trial, "_split", lambda _: 1 / 0)
    record = run(job, "fp32").record
    assert record["split_failed"] == "ZeroDivisionError: division by zero"
    assert "census" in record


def test_all_rows_start_from_the_same_weights_and_batches(job, tmp_path):
    """The same seed gives the same fingerprints in every precision, and its first gradients point the same way."""
    path = tmp_path / "gradients"
    reference = run(job, "fp32", gradients=path, reference=True)
    assert "gradients" not in reference.record
    for precision in ("bf16-lean", "fp16,loss_scale=128"):
        other = run(job, precision, gradients=path)
        assert other.record["weights"] == reference.record["weights"]
        assert other.record["batch"] == reference.record["batch"]
        assert other.record["gradients"]["cosine"] > 0.999
    assert run(job, "fp32", seed=1, survey=False).record["weights"] != reference.record["weights"]


def test_gradients_that_overflow_have_no_cosine(job, tmp_path):
    """A scale that is too large for the first step is skipped, and there is nothing to compare."""
    run(job, "fp32", gradients=tmp_path / "g", reference=True)
    assert math.isnan(run(job, "fp16,loss_scale=16777216", gradients=tmp_path / "g").record["gradients"]["cosine"])


def test_fp32_twice_is_the_same_run(job):
    """What is left between two runs of one seed is the precision, not chance."""
    one, other = (run(job, "fp32", survey=False) for _ in range(2))
    assert one.curves()["loss"] == other.curves()["loss"]
    assert "census" not in one.record


def test_a_run_that_is_stopped_early_is_still_a_run(job):
    """Its curve is as long as it came, and what takes time is left out."""
    (contender,) = parse_contenders(["fp32"])
    trial = Trial(job, TrialSpec(contender, SETTINGS, 0, 8, survey=True))
    trial.warm_up()
    trial.run_slice(5)
    trial.finish(quick=True)
    assert trial.record["stopped_after"] == 9
    assert trial.record["unsurveyed"]
    assert "split" not in trial.record
    assert "validation" in trial.record


def test_the_census_does_not_change_the_curves(job):
    """Curves are those of training alone, whatever came after."""
    trial = run(job, "fp32")
    assert len(trial.curves()["loss"]) == len(trial.curves()["skipped"]) == 16


def test_examples_are_counted_by_the_first_tensor():
    """Whatever a batch is made of."""
    assert batch_size_of({"x": [torch.zeros(3, 2)], "n": 5}) == 3
    assert batch_size_of([1, "a", torch.tensor(2.0)]) is None
