"""What is looked at before anything is compared."""

import dataclasses
import random

import pytest
import torch

from comparison_jobs import write_job
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.survey import survey
from halfstep.errors import SettingError
from halfstep.jobs.job import JobError
from halfstep.jobs.targets import load_target


@pytest.fixture
def target(tmp_path):
    return load_target(str(write_job(tmp_path)))


def changed(target, **fields):
    return dataclasses.replace(target, job=dataclasses.replace(target.job, **fields))


def test_a_sound_job_has_no_notes(target):
    """Machine, parameters, operations and matmul rates are known, and nothing is wrong."""
    found = survey(target, CompareSettings(batch=8))
    assert found["notes"] == []
    assert found["same_weights"]
    assert found["same_batches"]
    assert found["num_params"] == 8 * 16 + 16 + 16 + 1
    # forward and backward of two linear layers; the input needs no gradient
    assert found["flops_per_step"] == 2 * 8 * (8 * 16 * 2 + 16 * 3)
    assert found["matmul"][0]["format"] == "fp32"
    assert (found["batch"], found["samples"], found["device"]) == (8, 8, "cpu")


def test_a_job_that_is_not_deterministic_is_noticed(target):
    """Weights and batches that differ for the same seed are each named, with what to do."""
    system = random.SystemRandom()
    found = survey(changed(target, model=lambda: _noisy(system)), CompareSettings(batch=8))
    assert not found["same_weights"]
    assert "different initial weights" in found["notes"][0]
    found = survey(
        changed(
            target, data=lambda batch_size: [(torch.full((batch_size, 8), system.random()), torch.zeros(batch_size, 1))]
        ),
        CompareSettings(batch=8),
    )
    assert not found["same_batches"]
    assert "different first batch" in found["notes"][0]


def _noisy(system):
    model = torch.nn.Linear(8, 1)
    torch.nn.init.constant_(model.weight, system.random())
    return model


def test_a_job_that_ignores_the_batch_size_is_noticed(target):
    """What the batches hold is what counts."""
    found = survey(changed(target, data=lambda: [(torch.zeros(5, 8), torch.zeros(5, 1))]), CompareSettings(batch=8))
    assert found["samples"] == 5
    assert "batches of 8 were asked for and hold 5" in found["notes"][0]


def test_a_loss_that_is_no_scalar_is_an_error(target):
    """It would fail in every row; it is said once, before they run."""
    with pytest.raises(JobError, match="where one number is needed"):
        survey(changed(target, loss=lambda model, batch: model(batch[0])), CompareSettings(batch=8))


def test_validation_that_cannot_work_is_an_error(target):
    """No batches for it, or a metric that raises: said before anything is trained."""
    data = target.job.data
    without = changed(target, data=lambda batch_size, split: data(batch_size, split) if split == "train" else [])
    with pytest.raises(SettingError, match="gave no batches for split='val'.*some of the training data"):
        survey(without, CompareSettings(batch=8))
    with pytest.raises(JobError, match="The metric of the job.*division by zero"):
        survey(changed(target, metric=lambda model, batch: 1 / 0), CompareSettings(batch=8))


def test_a_device_that_is_not_there_is_an_error(target):
    """With the words to write instead."""
    for name in ("cuda:7", "gpu"):
        with pytest.raises(SettingError, match="write auto, cpu or cuda"):
            survey(target, CompareSettings(device=name))
