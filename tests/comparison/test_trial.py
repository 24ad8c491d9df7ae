"""One run, in this process."""

import dataclasses
import itertools
import math

import pytest
import torch

from comparison_jobs import write_job
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import TrialSpec
from halfstep.comparison.trial import Trial
from halfstep.comparison.variant import parse_variants
from halfstep.jobs.targets import load_target

SETTINGS = CompareSettings(steps=16, batch=8, warmup=4)


@pytest.fixture
def job(tmp_path):
    return load_target(str(write_job(tmp_path))).job


def run(job, precision, *, survey=True, gradients=None, reference=False, seed=0, finish=True, eager=None):
    (variant,) = parse_variants([], [precision]) if precision == "torch-amp" else parse_variants([precision])
    trial = Trial(job, TrialSpec(variant, SETTINGS, seed, 8, survey, gradients, reference, eager_gradients=eager))
    trial.warm_up()
    for count in SETTINGS.slices():
        trial.run_slice(count)
    if finish:
        trial.finish()
    trial.loop.close()
    return trial


def test_a_run_measures_everything_once(job):
    """Every timed step has a time, every step a loss; peak, bytes, phases, census and validation are measured."""
    trial = run(job, "bf16")
    measured, curves = trial.measurements, trial.curves()
    assert len(trial.seconds) == 12
    assert sum(trial.slices) == 12
    assert len(curves.loss) == 16
    assert all(map(math.isfinite, curves.loss))
    assert set(measured.split) == {"data", "forward", "backward", "step"}
    assert measured.census["products"] == {"bf16": pytest.approx(1)}
    assert measured.allocated == {
        "weights": 161 * 4,
        "gradients": 161 * 4,
        "optimizer": pytest.approx(161 * 8, rel=0.05),
    }
    assert measured.peak_bytes >= measured.base_bytes > 0
    assert measured.validation.metric is not None
    assert measured.warmup_steps == 4
    assert measured.truth["rows"]["precision"] == "bf16"
    assert measured.samples == 8


def test_a_schedule_as_long_as_the_run_does_not_end_it(job):
    """OneCycleLR raises beyond its total_steps, but the steps measured after training do not advance it."""
    schedule = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=SETTINGS.steps)  # noqa: E731
    for row in ("fp32", "torch-amp"):
        measured = run(dataclasses.replace(job, scheduler=schedule), row).measurements
        assert None not in (measured.split, measured.census, measured.validation)


def test_validation_ends_although_its_data_does_not(job):
    """Of data without a length, as many batches as there are steps are used; a shorter generator is used completely."""

    def endless(batch_size, split):
        while True:
            yield torch.ones(batch_size, 8), torch.ones(batch_size, 1)

    measured = run(dataclasses.replace(job, data=endless), "fp32", survey=False).measurements
    assert measured.validation_cut == SETTINGS.steps
    assert math.isfinite(measured.validation.loss)
    short = dataclasses.replace(job, data=lambda batch_size, split: itertools.islice(endless(batch_size, split), 5))
    assert run(short, "fp32", survey=False).measurements.validation_cut is None


def test_a_failure_after_training_does_not_cost_the_run(job, monkeypatch):
    """If timing the phases fails, the run completes and the reason is recorded."""
    monkeypatch.setattr(Trial, "_split", lambda _: 1 / 0)
    measured = run(job, "fp32").measurements
    assert measured.split_failed == "ZeroDivisionError: division by zero"
    assert measured.census is not None


def test_all_rows_start_from_the_same_weights_and_batches(job, tmp_path):
    """The same seed gives the same digests in every precision, and the first gradients nearly agree."""
    path = tmp_path / "gradients"
    reference = run(job, "fp32", gradients=path, reference=True)
    assert reference.measurements.gradients is None
    for precision in ("bf16-lean", "fp16,loss_scale=128"):
        other = run(job, precision, gradients=path).measurements
        assert other.weights_digest == reference.measurements.weights_digest
        assert other.batch_digest == reference.measurements.batch_digest
        assert other.gradients.cosine > 0.999
    another_seed = run(job, "fp32", seed=1, survey=False).measurements
    assert another_seed.weights_digest != reference.measurements.weights_digest


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own parts, which importing its compiler uses
def test_a_compiled_row_is_compared_with_its_form_without_compilation(job, tmp_path):
    """Run without the compiler, its gradients are those of the other form; those of another seed are not."""
    measured = run(job, "bf16-lean", eager=tmp_path / "e", finish=False).measurements
    assert measured.eager_gradients is None
    with torch.compiler.set_stance("force_eager"):
        compiled = [
            run(job, "bf16-lean,compile=on", eager=tmp_path / "e", seed=seed, finish=False).measurements
            for seed in (0, 1)
        ]
    assert compiled[0].eager_gradients.relative_error == 0
    assert compiled[1].eager_gradients.relative_error > 0.1
    assert compiled[0].gradients is None


def test_gradients_that_overflow_have_no_cosine(job, tmp_path):
    """A first step with too large a loss scale is skipped, and its cosine is NaN."""
    run(job, "fp32", gradients=tmp_path / "g", reference=True)
    overflowed = run(job, "fp16,loss_scale=16777216", gradients=tmp_path / "g").measurements
    assert math.isnan(overflowed.gradients.cosine)


def test_fp32_twice_is_the_same_run(job):
    """Two runs with the same seed and precision have identical losses."""
    one, other = (run(job, "fp32", survey=False) for _ in range(2))
    assert one.curves().loss == other.curves().loss
    assert one.measurements.census is None


def test_a_run_that_is_stopped_early_is_still_a_run(job):
    """Its curve has the steps so far, and the slow measurements are left out."""
    (variant,) = parse_variants(["fp32"])
    trial = Trial(job, TrialSpec(variant, SETTINGS, 0, 8, survey=True))
    trial.warm_up()
    trial.run_slice(5)
    trial.finish(quick=True)
    assert trial.measurements.stopped_after == 9
    assert trial.measurements.unsurveyed
    assert trial.measurements.split is None
    assert trial.measurements.validation is not None


def test_the_census_does_not_change_the_curves(job):
    """Curves contain only the training steps, not those of the census."""
    trial = run(job, "fp32")
    assert len(trial.curves().loss) == len(trial.curves().skipped) == 16


def test_a_job_without_validation_data_has_no_validation(job):
    """Everything else is measured."""
    train_data = job.data
    data = lambda batch_size, split: None if split == "val" else train_data(batch_size, split)  # noqa: E731
    trial = run(dataclasses.replace(job, data=data), "fp32", survey=False)
    assert trial.measurements.validation is None
    assert trial.measurements.truth is not None


def test_schedulers_of_both_kinds_step_in_a_baseline(job):
    """timm's schedulers are stepped with the number of updates, as in the Engine."""
    counts = []

    class Counting:
        def step(self, epoch):
            raise AssertionError

        def step_update(self, num_updates):
            counts.append(num_updates)

    run(dataclasses.replace(job, scheduler=lambda optimizer: Counting()), "torch-amp", survey=False)
    assert counts == list(range(1, 17))
