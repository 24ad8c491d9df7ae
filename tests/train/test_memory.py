"""Measured and predicted memory in a run file."""

import pytest
import torch

from halfstep.jobs.targets import load_target
from halfstep.precision.policy import Policy
from halfstep.train.config import TrainConfig
from halfstep.train.memory import PeakCounter, compare_memory


def test_both_numbers_and_their_error_are_logged(caplog):
    """The prediction uses the settings of the run, is split by category, and is logged with its error."""
    job = load_target("digits").job
    memory = compare_memory(job, Policy.parse("bf16"), TrainConfig(batch=64, steps=1), 20 * 2**20)
    assert memory["measured_bytes"] == 20 * 2**20
    assert 2**20 < memory["predicted_bytes"] < 2**28
    assert sum(memory["predicted_parts"].values()) == memory["predicted_bytes"]
    assert "measured" in caplog.text


@pytest.mark.parametrize("setting", [{"compile": True}, {"gradient_release": True, "max_norm": None}])
def test_settings_without_prediction_are_measured_only(setting):
    """Compiled runs and gradient release have only a measured peak."""
    job = load_target("digits").job
    memory = compare_memory(job, Policy.parse("bf16"), TrainConfig(steps=1, **setting), 1000)
    assert memory == {"measured_bytes": 1000, "predicted_bytes": None}


def test_predicting_draws_no_random_numbers():
    """The state of the generators does not change."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    compare_memory(load_target("digits").job, Policy.parse("fp32"), TrainConfig(steps=1), 1000)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cpu_has_no_peak_counter():
    """Only the allocator of a GPU counts it."""
    assert PeakCounter(torch.device("cpu")).peak() is None


@pytest.mark.gpu
def test_a_run_on_a_gpu_records_both(tmp_path):
    """The run file ends with the memory of the run, and both agree, whatever was allocated before."""
    from halfstep.checkpoint.runlog import read_runlog
    from halfstep.train import train
    from halfstep.train.resume import RUN_FILE

    before = torch.zeros(1 << 28, device="cuda")
    del before
    allocated = torch.zeros(1 << 26, device="cuda")
    train(load_target("digits").job, TrainConfig(steps=5), precision="bf16", out=tmp_path / "run")
    run = read_runlog(tmp_path / "run" / RUN_FILE)
    events = [event for event in run.events if event["event"] == "memory"]
    assert events[0]["predicted_bytes"] == pytest.approx(events[0]["measured_bytes"], rel=0.1)
    assert allocated.is_cuda
