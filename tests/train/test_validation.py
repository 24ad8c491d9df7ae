"""Validation of a run."""

import pytest
import torch
from torch.nn import functional as F

from halfstep.backends.context import RunContext
from halfstep.engine.engine import Engine
from halfstep.jobs.job import Job
from halfstep.train.stream import DataStream
from halfstep.train.validation import validate


def job(**fields):
    """A job whose validation batches have 3 examples and 1 example."""
    batches = [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0]])]
    defaults = {
        "model": lambda: torch.nn.Linear(1, 1),
        "data": lambda: batches,
        "loss": lambda model, batch: F.mse_loss(model(batch), batch),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "metric": lambda batch: batch.mean(),
    }
    return Job(**(defaults | fields))


def values_of(job):
    run = RunContext(batch_size=3)
    model = job.call("model", run)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    try:
        return validate(job, run, model, engine, DataStream(job, run, split="val"), 0)
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
