"""Validation of a run."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from halfstep.backends.context import RunContext
from halfstep.engine.engine import Engine
from halfstep.jobs.job import Job
from halfstep.train.stream import DataStream
from halfstep.train.validation import MAX_UNSIZED_BATCHES, ValidationStopped, validate


def job(**fields):
    """A job whose validation batches have 3 examples and 1 example."""
    batches = [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0]])]
    defaults = {
        "model": lambda: torch.nn.Linear(1, 1),
        "data": lambda split: batches,
        "loss": lambda model, batch: F.mse_loss(model(batch), batch),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "metric": lambda batch: batch.mean(),
    }
    return Job(**(defaults | fields))


def values_of(job, **options):
    run = RunContext(batch_size=3)
    model = job.call("model", run)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    try:
        return validate(job, run, model, engine, DataStream(job, run, split="val"), 0, **options)
    finally:
        engine.close()


def test_batches_are_weighted_by_their_size():
    """The metric is the mean over examples, not over batches."""
    assert values_of(job())["metric"] == pytest.approx(4)


def test_without_a_metric_there_is_only_a_loss():
    """A job without a metric has no metric value."""
    assert set(values_of(job(metric=None))) == {"loss"}


def test_validation_does_not_change_the_random_numbers():
    """Random numbers drawn by validation are restored."""
    noisy = job(metric=lambda batch: torch.rand(()))
    torch.manual_seed(1)
    values_of(job())  # builds a model, as the next line does
    expected = torch.rand(3)
    torch.manual_seed(1)
    values_of(noisy)
    assert torch.equal(torch.rand(3), expected)


def test_endless_data_is_cut_with_a_warning(caplog):
    """Data without a length ends after a documented number of batches."""
    values = values_of(job(data=lambda split: (torch.full((1, 1), float(n)) for n in itertools.count())))
    assert values["metric"] == pytest.approx((MAX_UNSIZED_BATCHES - 1) / 2)
    assert f"first {MAX_UNSIZED_BATCHES} batches" in caplog.text
    assert "eval_batches" in caplog.text


def test_data_that_does_not_end_at_its_length_is_cut_there():
    """A length is trusted as the limit, whatever the iterator does."""

    class Endless:
        def __len__(self):
            return 3

        def __iter__(self):
            return (torch.full((1, 1), float(n)) for n in itertools.count())

    assert values_of(job(data=lambda split: Endless()))["metric"] == pytest.approx(1)


def test_a_limit_applies_to_any_data(caplog):
    """The user's own limit is not a reason for a warning."""
    assert values_of(job(), limit=1)["metric"] == pytest.approx(2)
    assert "Validation used" not in caplog.text


@pytest.mark.parametrize("data", [lambda split: None, lambda: [torch.ones(1, 1)]], ids=["None", "no split argument"])
def test_a_job_may_have_no_validation_data(data):
    """None for split='val', or data that does not distinguish the splits: there is nothing to validate."""
    assert values_of(job(data=data)) == {}


def test_a_stop_ends_a_validation_between_two_batches():
    """Ctrl-C does not wait for the end of the split."""
    batches = []

    def metric(batch):
        batches.append(batch)
        return 0.0

    with pytest.raises(ValidationStopped):
        values_of(job(metric=metric), stopped=lambda: len(batches) == 1)
    assert len(batches) == 1


def test_a_metric_that_is_not_finite_is_reported(caplog):
    """A NaN metric cannot rank a checkpoint, which the user should know."""
    values_of(job(metric=lambda batch: float("nan")))
    assert "metric is nan" in caplog.text
