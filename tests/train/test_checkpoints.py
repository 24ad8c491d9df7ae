"""The checkpoints of one run."""

import pytest
import torch

from halfstep.backends.context import RunContext
from halfstep.checkpoint.directory import read_meta
from halfstep.engine.engine import Engine
from halfstep.errors import SettingError
from halfstep.jobs.job import Job
from halfstep.train.checkpoints import Progress, RunCheckpoints
from halfstep.train.config import TrainConfig
from halfstep.train.stream import DataStream

CONFIG = TrainConfig(batch=2, steps=4)


@pytest.fixture
def run():
    """An engine and its data."""
    job = Job(
        model=lambda: torch.nn.Linear(2, 1),
        data=lambda: [torch.ones(2, 2)] * 3,
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    context = RunContext(batch_size=2)
    model = job.call("model", context)
    engine = Engine(model, job.call("optimizer", context, model=model), "fp32")
    yield engine, DataStream(job, context, split="train")
    engine.close()


def test_an_existing_run_needs_resume_and_resume_an_existing_run(tmp_path, run):
    """Starting over a run and resuming nothing are both errors."""
    with pytest.raises(SettingError, match="nothing to resume"):
        RunCheckpoints(tmp_path, CONFIG, resume=True, has_metric=True)
    first = RunCheckpoints(tmp_path, CONFIG, resume=False, has_metric=True)
    assert first.restore(*run) == Progress()
    first.save(*run, Progress(), epoch_done=True, validated=False)
    with pytest.raises(SettingError, match="already contains a run"):
        RunCheckpoints(tmp_path, CONFIG, resume=False, has_metric=True)


def test_progress_is_restored(tmp_path, run):
    """A checkpoint at the end of an epoch resumes with the next one, and keeps the last validation."""
    first = RunCheckpoints(tmp_path, CONFIG, resume=False, has_metric=True)
    first.save(*run, Progress(3, {"loss": 0.5}), epoch_done=True, validated=True)
    again = RunCheckpoints(tmp_path, CONFIG, resume=True, has_metric=True)
    assert again.latest == first.latest
    assert again.restore(*run) == Progress(4, {"loss": 0.5})


def test_other_settings_of_the_trajectory_raise(tmp_path, run):
    """The error has the old and the new value."""
    RunCheckpoints(tmp_path, CONFIG, resume=False, has_metric=True).save(
        *run, Progress(), epoch_done=True, validated=False
    )
    other = RunCheckpoints(tmp_path, TrainConfig(batch=4, steps=4), resume=True, has_metric=True)
    with pytest.raises(SettingError, match="batch: was 2, is 4"):
        other.restore(*run)


@pytest.mark.parametrize(
    ("values", "validated", "has_metric", "expected"),
    [
        ({"loss": 0.5, "metric": 0.9}, True, True, (0.9, True)),
        ({"loss": 0.5}, True, False, (0.5, False)),
        ({"loss": 0.5, "metric": 0.9}, False, True, (None, True)),
        ({}, False, False, (None, False)),
    ],
)
def test_the_metric_or_else_the_loss_ranks_a_checkpoint(tmp_path, run, values, validated, has_metric, expected):
    """A checkpoint is ranked by the validation that it belongs to, and not at all without one."""
    checkpoints = RunCheckpoints(tmp_path, CONFIG, resume=False, has_metric=has_metric)
    path = checkpoints.save(*run, Progress(0, values), epoch_done=True, validated=validated)
    folder = read_meta(path)["folder"]
    assert (folder["metric"], folder["higher_is_better"]) == expected
