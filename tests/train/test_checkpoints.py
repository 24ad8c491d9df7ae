"""The checkpoints of one run."""

import pytest
import torch

from halfstep.backends.context import RunContext
from halfstep.checkpoint.retention import CheckpointFolder
from halfstep.engine.engine import Engine
from halfstep.errors import SettingError
from halfstep.jobs.job import Job
from halfstep.train.checkpoints import Progress, RunCheckpoints, check_out
from halfstep.train.config import TrainConfig
from halfstep.train.resume import RUN_FILE
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
    first.save(*run, Progress(), epoch_done=True)
    with pytest.raises(SettingError, match="already contains a run"):
        RunCheckpoints(tmp_path, CONFIG, resume=False, has_metric=True)


def test_a_run_whose_checkpoints_are_all_damaged_says_that_it_starts_again(tmp_path, run, caplog):
    """The damage is reported, and that nothing is left to continue from."""
    first = RunCheckpoints(tmp_path, CONFIG, resume=False, has_metric=True)
    first.save(*run, Progress(), epoch_done=True)
    (tmp_path / RUN_FILE).write_text("")
    (state,) = tmp_path.rglob("state.safetensors")
    state.write_bytes(state.read_bytes()[:50])
    again = RunCheckpoints(tmp_path, CONFIG, resume=True, has_metric=True)
    assert again.restore(*run) == Progress()
    assert "truncated" in caplog.text
    assert "starts again at step 0" in caplog.text


def test_progress_is_restored(tmp_path, run):
    """A checkpoint whose validation is due resumes with it; one with a score resumes with the score's values."""
    first = RunCheckpoints(tmp_path, CONFIG, resume=False, has_metric=True)
    progress = Progress(4, {"loss": 0.5}, unvalidated=3)
    first.save(*run, progress, epoch_done=True)
    again = RunCheckpoints(tmp_path, CONFIG, resume=True, has_metric=True)
    assert again.latest == first.latest
    assert again.restore(*run) == progress
    first.score({"loss": 0.25})
    assert again.restore(*run) == Progress(4, {"loss": 0.25})


def test_other_settings_of_the_trajectory_raise(tmp_path, run):
    """The error has the old and the new value."""
    RunCheckpoints(tmp_path, CONFIG, resume=False, has_metric=True).save(*run, Progress(), epoch_done=True)
    other = RunCheckpoints(tmp_path, TrainConfig(batch=4, steps=4), resume=True, has_metric=True)
    with pytest.raises(SettingError, match="batch: was 2, is 4"):
        other.restore(*run)


@pytest.mark.parametrize(
    ("values", "has_metric", "expected"),
    [
        ({"loss": 0.5, "metric": 0.9}, True, (0.9, True)),
        ({"loss": 0.5}, False, (0.5, False)),
        ({}, True, (None, True)),
        ({}, False, (None, False)),
    ],
)
def test_the_metric_or_else_the_loss_ranks_a_checkpoint(tmp_path, run, values, has_metric, expected):
    """A checkpoint is ranked by the validation that it belongs to, and not at all without one."""
    checkpoints = RunCheckpoints(tmp_path, CONFIG, resume=False, has_metric=has_metric)
    path = checkpoints.save(*run, Progress(0), epoch_done=True)
    if values:
        checkpoints.score(values)
    (entry,) = CheckpointFolder(path.parent).checkpoints()
    assert (entry.metric, entry.higher_is_better) == expected


def test_weights_that_are_not_finite_never_replace_a_healthy_checkpoint(tmp_path, run):
    """They are written aside once, under a name that nothing resumes from, and nothing is rotated out for them."""
    engine, data = run
    config = TrainConfig(batch=2, steps=4, keep_last=1, keep_best=0)
    checkpoints = RunCheckpoints(tmp_path, config, resume=False, has_metric=False)
    healthy = checkpoints.save(engine, data, Progress(1), epoch_done=True)
    with torch.no_grad():
        engine.model.weight[0, 1] = float("inf")
    for step in (5, 6):
        engine.progress.attempts = step
        assert checkpoints.save(engine, data, Progress(2), epoch_done=True) is None
        assert checkpoints.nonfinite == ["weight"]
        checkpoints.score({"loss": 0.1})
    assert sorted(path.name for path in healthy.parent.iterdir() if path.is_dir()) == [
        "nonfinite-00000005",
        healthy.name,
    ]
    again = RunCheckpoints(tmp_path, config, resume=True, has_metric=False)
    assert again.latest == healthy
    assert again.restore(engine, data) == Progress(1)
    assert not checkpoints.save(engine, data, Progress(2), epoch_done=True).name.startswith("nonfinite")


@pytest.mark.parametrize("name", ["file", "file/below", "file/far/below"])
def test_a_directory_that_cannot_be_created_is_rejected_before_anything_runs(tmp_path, name):
    """The message names the file that is in the way."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"file is not a directory; pass another --out"):
        check_out(tmp_path / name)


def test_a_directory_without_permission_is_rejected(tmp_path, monkeypatch):
    """The nearest existing directory is the one that is checked."""
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(SettingError, match="no permission to write to"):
        check_out(tmp_path / "new" / "run")


def test_a_directory_in_which_nothing_can_be_created_is_rejected(tmp_path, monkeypatch):
    """Permission is not enough in /proc or on a full disk: the reason is the system's, and nothing is left behind."""
    check_out(tmp_path / "new" / "run")
    assert not list(tmp_path.iterdir())

    def fail(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", fail)
    with pytest.raises(
        SettingError, match=r"nothing can be created in .* \(No space left on device\); pass another --out"
    ):
        check_out(tmp_path / "new" / "run")
