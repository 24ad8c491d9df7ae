"""Measuring a step on a GPU, where there is one."""

import pytest
import torch

from halfstep.errors import SettingError
from halfstep.jobs.targets import load_target
from halfstep.planning.estimator import Estimator
from halfstep.planning.finder import find_batch_size
from halfstep.planning.measured import measure_step, require_gpu
from halfstep.planning.trace import StepOptions
from halfstep.precision.policy import Policy
from planning_jobs import small_job


def test_measuring_needs_a_gpu(monkeypatch):
    """Measuring without a GPU raises."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match="sees none here"):
        require_gpu("--verify")


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A CPU in place of a GPU, with fixed values for torch's counters."""
    monkeypatch.setattr("halfstep.planning.measured.require_gpu", lambda _: torch.device("cpu"))
    counters = {
        "memory_allocated": 70 << 20,
        "max_memory_allocated": 170 << 20,
        "max_memory_reserved": 200 << 20,
        "get_device_name": "a CPU",
    }
    for name, value in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)


def test_measuring_subtracts_earlier_allocations(pretended_gpu):
    """The peak excludes what was allocated before and includes cuBLAS's workspaces, like the prediction."""
    assert measure_step(small_job(), Policy.parse("fp32"), 4).peak_bytes == (170 - 70 + 64) << 20


def test_measuring_leaves_the_model_unchanged(pretended_gpu):
    """Measuring changes neither the job's module and its dtype nor the random number state."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 4))
    before, rng = model[0].weight.clone(), torch.get_rng_state()
    measure_step(small_job(model=lambda: model), Policy.parse("bf16-lean"), 4)
    assert model[0].weight.dtype is torch.float32
    assert torch.equal(model[0].weight, before)
    assert torch.equal(rng, torch.get_rng_state())


def test_accumulated_steps_are_measured_as_a_window(pretended_gpu):
    """With accumulation a step has several micro-batches, and an EMA can be included."""
    measured = measure_step(small_job(), Policy.parse("bf16-lean"), 4, StepOptions(accumulate=2, ema=True))
    assert measured.batch == 4


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-lean"])
def test_prediction_agrees_on_this_gpu(precision):
    """Predicted and measured peak of ViT-S/16 agree within 7 %, and nothing stays allocated."""
    job, policy = load_target("vit_s_16").job, Policy.parse(precision)
    measure_step(job, policy, 8)
    before = torch.cuda.memory_allocated()
    measured = measure_step(job, policy, 32)
    assert abs(measured.error(Estimator(job, policy).at(32))) < 0.07
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_found_batch_is_confirmed():
    """On a GPU the largest batch is confirmed by trial, and the random number state is unchanged."""
    rng = torch.get_rng_state()
    result = find_batch_size(small_job(), "bf16")
    assert result.confirmed
    assert dict(result.trials)[result.batch]
    assert torch.equal(rng, torch.get_rng_state())
