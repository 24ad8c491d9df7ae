"""Checks of machine and job before anything is compared."""

import dataclasses
import random

import pytest
import torch

from comparison_jobs import write_job
from halfstep.comparison.preflight import run_preflight
from halfstep.comparison.settings import CompareSettings
from halfstep.errors import SettingError
from halfstep.jobs.job import JobError
from halfstep.jobs.targets import load_target


@pytest.fixture
def target(tmp_path):
    return load_target(str(write_job(tmp_path)))


def changed(target, **fields):
    return dataclasses.replace(target, job=dataclasses.replace(target.job, **fields))


def test_a_sound_job_has_no_notes(target):
    """A deterministic job has its parameters, operations and matmul rates measured, and no notes."""
    survey = run_preflight(target, CompareSettings(batch=8))
    assert survey.notes == ()
    assert survey.same_weights
    assert survey.same_batches
    assert survey.num_params == 8 * 16 + 16 + 16 + 1
    # forward and backward of two linear layers; the input needs no gradient
    assert survey.flops_per_step == 2 * 8 * (8 * 16 * 2 + 16 * 3)
    assert survey.matmul[0]["format"] == "fp32"
    assert (survey.batch, survey.samples, survey.device) == (8, 8, "cpu")


def test_a_job_that_is_not_deterministic_is_noticed(target):
    """Weights and batches that differ for the same seed each have a note."""
    system = random.SystemRandom()
    survey = run_preflight(changed(target, model=lambda: _noisy(system)), CompareSettings(batch=8))
    assert not survey.same_weights
    assert "different initial weights" in survey.notes[0]
    survey = run_preflight(
        changed(
            target, data=lambda batch_size: [(torch.full((batch_size, 8), system.random()), torch.zeros(batch_size, 1))]
        ),
        CompareSettings(batch=8),
    )
    assert not survey.same_batches
    assert "different first batch" in survey.notes[0]


def _noisy(system):
    model = torch.nn.Linear(8, 1)
    torch.nn.init.constant_(model.weight, system.random())
    return model


def test_a_job_that_ignores_the_batch_size_is_noticed(target):
    """The actual examples are counted, and a note names both numbers."""
    survey = run_preflight(
        changed(target, data=lambda: [(torch.zeros(5, 8), torch.zeros(5, 1))]), CompareSettings(batch=8)
    )
    assert survey.samples == 5
    assert "8 was requested, but its batches contain 5 examples" in survey.notes[0]


def test_a_loss_that_is_not_a_scalar_raises(target):
    """A mistake that would fail in every row raises once, before they run."""
    with pytest.raises(JobError, match="where one number is needed"):
        run_preflight(changed(target, loss=lambda model, batch: model(batch[0])), CompareSettings(batch=8))


def test_broken_validation_raises(target):
    """Missing validation batches or a failing metric raise before anything is trained."""
    data = target.job.data
    without = changed(target, data=lambda batch_size, split: data(batch_size, split) if split == "train" else [])
    with pytest.raises(SettingError, match="gave no batches for split='val'.*return None for split='val'"):
        run_preflight(without, CompareSettings(batch=8))
    with pytest.raises(JobError, match="The metric of the job.*division by zero"):
        run_preflight(changed(target, metric=lambda model, batch: 1 / 0), CompareSettings(batch=8))


def test_an_unavailable_device_raises(target):
    """The error names the device."""
    for name, message in (("cuda:7", "device='cuda:7' is not available"), ("gpu", "unknown device")):
        with pytest.raises(SettingError, match=message):
            run_preflight(target, CompareSettings(device=name))


def test_a_scheduler_that_needs_validation_results_is_left_out_and_noted(target):
    """A comparison has one validation, after training."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    survey = run_preflight(changed(target, scheduler=plateau), CompareSettings(batch=8))
    assert "trained with the initial learning rate" in survey.notes[0]


def test_a_job_without_validation_data_can_be_compared(target):
    """There is nothing to try out."""
    data = lambda split: None if split == "val" else [(torch.zeros(8, 8), torch.zeros(8, 1))]  # noqa: E731
    assert run_preflight(changed(target, data=data), CompareSettings(batch=8)).notes == ()


def test_the_default_batch_size_of_the_job_is_used(target):
    """As the signature of its data has it."""
    sized = dataclasses.replace(target, defaults=(("batch", 4),))
    assert run_preflight(sized, CompareSettings()).batch == 4
