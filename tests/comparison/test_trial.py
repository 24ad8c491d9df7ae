"""One run, in this process."""

import dataclasses
import itertools
import math

import pytest
import torch

from comparison_jobs import write_job
from halfstep.comparison.numerics.skips import root_cause, skip_notes
from halfstep.comparison.record import read_run, write_run
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
    assert measured.validation.seconds > 0
    assert measured.validation.samples > 0
    assert measured.predicted.gpu == "A100 40GB"  # of a GPU that this machine does not have
    assert sum(measured.predicted.parts.values()) == measured.predicted.peak_bytes


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


def test_underflow_is_measured_in_every_row(job):
    """A loss scale that is far too small loses most of the gradient in fp16; fp32 and a sensible scale lose nothing."""
    expected = {"fp32": 0.0, "fp16-lean,loss_scale=128": 0.0, "torch-amp": 0.0}
    for row, share in expected.items():
        numerics = run(job, row).measurements.numerics
        assert (numerics.underflow, numerics.worst_layer, numerics.step) == (share, None, 17)
    for row in ("fp16,loss_scale=1e-7", "fp16-lean,loss_scale=1e-7"):
        trial = run(job, row)
        numerics = trial.measurements.numerics
        assert 0.5 < numerics.underflow <= numerics.worst_underflow <= 1
        assert numerics.worst_layer in {"0", "2"}
        assert set(trial.result().sample.gradients) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert set(trial.result().sample.activations) == {"0", "1", "2"}


def test_sampling_changes_neither_the_curves_nor_the_timed_steps(job, monkeypatch):
    """Timed steps are not recorded for a replay, and curves are those of a run that was not sampled."""
    active = []
    forward = Trial._forward

    def spied(trial, *args):
        active.append((len(trial._losses), trial.loop.engine.replays.active))
        return forward(trial, *args)

    monkeypatch.setattr(Trial, "_forward", spied)
    sampled = run(job, "fp16").curves()
    assert {on for done, on in active if done < 4} == {True}
    assert {on for done, on in active if 4 <= done < 16} == {False}
    assert sampled == run(job, "fp16", survey=False).curves()


def test_a_job_that_cannot_run_in_fp32_still_has_the_rest(job):
    """The reason is recorded, the sample is there, and phases and census are measured."""

    def loss(model, batch):
        assert next(model.parameters()).dtype is torch.bfloat16, "bf16 only"
        return torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1])

    trial = run(dataclasses.replace(job, loss=loss, metric=None), "bf16-lean")
    measured = trial.measurements
    assert measured.numerics_failed.startswith("its gradients could not be computed in fp32 (JobError: ")
    assert "bf16 only" in measured.numerics_failed
    assert (measured.numerics.underflow, measured.split_failed, measured.census_failed) == (None, None, None)
    assert trial.result().sample is not None


# --- why steps were skipped --------------------------------------------------------------------------------------


def large_weights(job):
    """The first layer gives more than 65504."""

    def model():
        net = job.model()
        with torch.no_grad():
            net[0].weight.fill_(6e4)
        return net

    return dataclasses.replace(job, model=model)


def bad_data(job):
    """Every batch has a NaN."""
    data = job.data

    def with_nan(batch_size, split):
        return [(torch.cat([x[:, :7], torch.full_like(x[:, 7:], math.nan)], 1), y) for x, y in data(batch_size, split)]

    return dataclasses.replace(job, data=with_nan)


def bad_weights(job):
    """One weight is NaN from the start."""

    def model():
        net = job.model()
        with torch.no_grad():
            net[2].weight[0, 3] = math.nan
        return net

    return dataclasses.replace(job, model=model)


def recorded(trial, path):
    """The run as a comparison reads it from its file."""
    write_run(path, spec=trial.spec, command=["x"], environment={}, result=trial.result(), failure=None)
    return read_run(path)


@pytest.mark.parametrize(
    ("change", "row", "cause", "module", "words"),
    [
        (large_weights, "fp16", "forward", "0", "overflowed in the forward pass"),
        (large_weights, "fp16-lean", "forward", "0", "overflowed in the forward pass"),
        (bad_data, "fp16", "data", "0", "No operation of the step computed it"),
        (bad_weights, "fp16", "weights", "2", "2.weight (float32) contains NaN"),
    ],
)
def test_what_the_loss_scale_did_not_cause_is_not_blamed_on_it(job, tmp_path, change, row, cause, module, words):
    """Every step is skipped, the cause and its module are named, and no note blames the scale."""
    path = tmp_path / "gradients"
    run(job, "fp32", gradients=path, reference=True, finish=False)
    trial = run(change(job), row, gradients=path)
    numerics = trial.measurements.numerics
    assert {(c.cause, c.module, c.scale_too_high) for c in trial.measurements.skip_causes} == {(cause, module, False)}
    assert (numerics.overflowed, numerics.worst_layer, numerics.underflow) == (cause, module, None)
    record = recorded(trial, tmp_path / "run.jsonl")
    assert record.measured.skip_causes == trial.measurements.skip_causes
    notes = skip_notes([record])
    assert words in notes[0]
    assert "no cosine" in notes[0]
    assert not any("initial loss scale" in note for note in notes)
    assert words in root_cause(record)


def test_an_initial_scale_that_is_too_high_is_blamed(job, tmp_path):
    """The backward pass overflows at this scale and at no lower one, and the note has the scale."""
    path = tmp_path / "gradients"
    run(job, "fp32", gradients=path, reference=True, finish=False)
    trial = run(job, "fp16,loss_scale=16777216", gradients=path)
    assert all(c.cause == "backward" and c.scale_too_high for c in trial.measurements.skip_causes)
    (note,) = skip_notes([recorded(trial, tmp_path / "run.jsonl")])
    assert note.startswith("the gradients of the first step overflowed at the initial loss scale 1.67772e+07: ")


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["fp16", "fp16-lean"])
def test_on_a_gpu_the_last_step_of_the_warm_up_is_examined(job, row):
    """Its outcome arrives late, and is read before the timed steps; the sampled step is examined too."""
    settings = dataclasses.replace(SETTINGS, device="cuda", warmup=1)
    (variant,) = parse_variants([row])
    trial = Trial(bad_data(job), TrialSpec(variant, settings, 0, 8, survey=True))
    trial.warm_up()
    assert [(cause.step, cause.cause) for cause in trial.measurements.skip_causes] == [(1, "data")]
    trial.run_slice(3)
    trial.finish()
    trial.loop.close()
    assert [cause.step for cause in trial.measurements.skip_causes] == [1, 5]
    assert trial.measurements.numerics.overflowed == "data"


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
