"""The training loop: what it writes, how it stops, that a resumed run is the run that was never stopped."""

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from halfstep.checkpoint.directory import load_checkpoint
from halfstep.checkpoint.export import masters_of
from halfstep.checkpoint.retention import CheckpointFolder
from halfstep.checkpoint.runlog import read_runlog
from halfstep.errors import HalfstepError, OverflowStop
from halfstep.jobs.job import Job, JobError
from halfstep.train import TrainConfig, train
from halfstep.train.recorder import SilentObserver


def tiny_job(**changed):
    """A job with dropout, batch norm and a shuffled DataLoader: everything a resume can get wrong."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(96, 6, generator=g)
    y = (x @ torch.randn(6, 3, generator=g)).argmax(-1)
    sets = {
        "train": torch.utils.data.TensorDataset(x[:64], y[:64]),
        "val": torch.utils.data.TensorDataset(x[64:], y[64:]),
    }
    fields = {
        "model": lambda: torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(0.2),
            torch.nn.GELU(),
            torch.nn.Linear(16, 3),
        ),
        "data": lambda batch_size, split: torch.utils.data.DataLoader(
            sets[split], batch_size, shuffle=split == "train"
        ),
        "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "metric": lambda model, batch: (model(batch[0]).argmax(-1) == batch[1]).float().mean(),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
    }
    return Job(**(fields | changed))


def weights_of(outcome):
    return masters_of(load_checkpoint(outcome.checkpoint))


class Listening(SilentObserver):
    """Remembers everything it was told, and may interrupt."""

    def __init__(self, stop_at=None):
        self.lines, self.values, self.saves, self._stop_at = [], [], [], stop_at

    def stepped(self, line):
        self.lines.append(line)
        if line.step == self._stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def validated(self, epoch, values):
        self.values.append((epoch, values))

    def saved(self, path):
        self.saves.append(path)


def test_a_run_writes_everything_it_promises(tmp_path):
    """Run file, checkpoints and outcome agree with what the observer saw."""
    observer = Listening()
    config = TrainConfig(batch=16, epochs=3, accumulate=3)
    outcome = train(tiny_job(), config, precision="bf16", out=tmp_path / "run", observer=observer, command=["test"])
    run = read_runlog(tmp_path / "run" / "run.jsonl")
    assert run.header["policy"] == "bf16"
    assert run.header["config"]["batch"] == 16
    # 4 micro-batches an epoch: a window of 3 and a short one of 1.
    assert [r["attempted"] for r in run.records] == [1, 2, 3, 4, 5, 6]
    assert [r["micro_batch"] for r in run.records] == [3, 4, 7, 8, 11, 12]
    assert [line.loss for line in observer.lines] == [r["loss"] for r in run.records]
    assert [e["event"] for e in run.events if e["event"] != "numerics"] == [
        "truth", *["saved", "validation"] * 3, "ended",
    ]  # fmt: skip
    truth = next(e for e in run.events if e["event"] == "truth")
    assert truth["truth"]["rows"]["gradients"] == "fp32"
    assert outcome.steps == 6
    assert outcome.epochs == 3
    assert outcome.validation == observer.values[-1][1]
    assert outcome.checkpoint.name == "step-00000006"
    assert outcome.stopped_by is None


def test_steps_end_a_run_in_mid_epoch(tmp_path):
    """--steps counts optimizer steps, and the end is validated and saved."""
    outcome = train(tiny_job(), TrainConfig(batch=16, steps=6), precision="fp32", out=tmp_path / "run")
    assert outcome.steps == 6
    assert "metric" in outcome.validation
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").latest() == outcome.checkpoint


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-lean", "fp16-lean"])
@pytest.mark.parametrize("stop_at", [3, 8])
def test_a_stopped_and_resumed_run_is_the_run_that_was_never_stopped(precision, stop_at, tmp_path):
    """SIGTERM in mid-epoch or at its end, then --resume: the same weights and the same records, bit for bit."""
    config = TrainConfig(batch=16, epochs=4, ema=0.9, accumulate=1)
    plain = train(tiny_job(), config, precision=precision, out=tmp_path / "plain")
    stopped = train(tiny_job(), config, precision=precision, out=tmp_path / "run", observer=Listening(stop_at))
    assert stopped.stopped_by == "SIGTERM"
    assert stopped.steps in {stop_at, stop_at + 1}
    torch.rand(7)
    resumed = train(tiny_job(), config, precision=precision, out=tmp_path / "run", resume=True)
    assert resumed.stopped_by is None
    a, b = weights_of(plain), weights_of(resumed)
    assert all(torch.equal(a[name], b[name]) for name in a)
    runs = [read_runlog(tmp_path / name / "run.jsonl") for name in ("plain", "run")]
    keys = ("attempted", "applied", "micro_batch", "loss", "lr", "scale", "grad_norm")
    assert [[r[k] for k in keys] for r in runs[0].records] == [[r[k] for k in keys] for r in runs[1].records]
    assert plain.validation == resumed.validation


def test_a_run_can_be_made_longer(tmp_path):
    """Resuming with more epochs goes on; with a different batch it is refused."""
    out = tmp_path / "run"
    train(tiny_job(), TrainConfig(batch=16, epochs=2), precision="fp32", out=out)
    longer = train(tiny_job(), TrainConfig(batch=16, epochs=3), precision="fp32", out=out, resume=True)
    plain = train(tiny_job(), TrainConfig(batch=16, epochs=3), precision="fp32", out=tmp_path / "plain")
    assert longer.steps == plain.steps == 12
    a, b = weights_of(plain), weights_of(longer)
    assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(HalfstepError, match="batch: was 16, is 8"):
        train(tiny_job(), TrainConfig(batch=8, epochs=4), precision="fp32", out=out, resume=True)


@pytest.mark.parametrize(("first", "more"), [(6, 9), (4, 7), (8, 12)])
def test_a_run_ended_by_its_steps_goes_on_in_mid_epoch(first, more, tmp_path):
    """--steps ends a run anywhere; more steps later give the run that was never ended, however it was validated."""
    out = tmp_path / "run"
    train(tiny_job(), TrainConfig(batch=16, steps=first, eval_every=3), precision="bf16", out=out)
    longer = train(tiny_job(), TrainConfig(batch=16, steps=more, eval_every=2), precision="bf16", out=out, resume=True)
    plain = train(tiny_job(), TrainConfig(batch=16, steps=more), precision="bf16", out=tmp_path / "plain")
    assert longer.steps == plain.steps == more
    a, b = weights_of(plain), weights_of(longer)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("async_save", [False, True])
def test_checkpoints_keep_the_last_and_the_best(tmp_path, async_save):
    """keep_last newest and keep_best best by metric survive, however they are written."""
    scores = iter([0.1, 0.9, 0.2, 0.3, 0.4])
    current = {}

    def metric(model, batch, epoch):
        if epoch not in current:
            current[epoch] = next(scores)
        return current[epoch]

    config = TrainConfig(batch=32, epochs=5, keep_last=2, keep_best=1, async_save=async_save)
    train(tiny_job(metric=metric), config, precision="fp32", out=tmp_path / "run")
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    assert [c.step for c in folder.checkpoints()] == [4, 8, 10]
    assert folder.best().name == "step-00000004"


def test_saving_in_the_background_changes_neither_run_nor_records(tmp_path):
    """Weights, losses, checkpoints and the events in the run file are those of a run that waits, after a resume too."""
    runs = []
    for async_save in (False, True):
        out = tmp_path / str(async_save)
        config = TrainConfig(batch=16, steps=5, save_every=2, async_save=async_save)
        first = train(tiny_job(), config, precision="bf16", out=out)
        assert first.checkpoint.name == "step-00000005"
        outcome = train(tiny_job(), replace(config, steps=9), precision="bf16", out=out, resume=True)
        log = read_runlog(out / "run.jsonl")
        saved = [record["path"] for record in log.events if record["event"] == "saved"]
        names = [entry.path.name for entry in CheckpointFolder(out / "checkpoints").checkpoints()]
        runs.append((weights_of(outcome), [r["loss"] for r in log.records], saved, names, outcome.checkpoint.name))
    assert runs[0][1:] == runs[1][1:]
    assert len(runs[1][2]) == 6
    assert all(torch.equal(runs[0][0][name], runs[1][0][name]) for name in runs[0][0])


def test_a_save_that_fails_in_the_background_ends_the_run(tmp_path, monkeypatch):
    """With the reason, at the next save; what was saved before is there."""
    real, saves = os.fsync, []

    def full(handle):
        if threading.current_thread() is not threading.main_thread():
            saves.append(handle)
            if len(saves) > 12:  # the first checkpoint has 5 files, a directory and its parent
                raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    config = TrainConfig(batch=16, steps=12, save_every=2, async_save=True)
    with pytest.raises(HalfstepError, match="No space left on device"):
        train(tiny_job(), config, precision="fp32", out=tmp_path / "run")
    assert [c.step for c in CheckpointFolder(tmp_path / "run" / "checkpoints").checkpoints()] == [2]


def test_a_job_without_metric_keeps_the_lowest_validation_loss(tmp_path):
    """The validation loss ranks checkpoints when there is no metric."""
    train(tiny_job(metric=None), TrainConfig(batch=32, epochs=4, keep_last=1), precision="fp32", out=tmp_path / "run")
    found = CheckpointFolder(tmp_path / "run" / "checkpoints").checkpoints()
    best = min((c for c in found), key=lambda c: c.metric)
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").best() == best.path
    assert best.higher_is_better is False


def test_a_directory_with_a_run_is_not_overwritten(tmp_path):
    """Without --resume an existing run is refused; with it, an empty one is."""
    train(tiny_job(), TrainConfig(batch=32, steps=1), precision="fp32", out=tmp_path / "run")
    with pytest.raises(HalfstepError, match="already contains a run"):
        train(tiny_job(), TrainConfig(batch=32, steps=1), precision="fp32", out=tmp_path / "run")
    with pytest.raises(HalfstepError, match="nothing to resume"):
        train(tiny_job(), TrainConfig(batch=32, steps=1), precision="fp32", out=tmp_path / "none", resume=True)
    with pytest.raises(HalfstepError, match="no end"):
        train(tiny_job(), TrainConfig(), precision="fp32", out=tmp_path / "endless")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss", lambda model, batch: model(batch[0]), "loss"),
        ("loss", lambda model, batch: 1 / 0, "ZeroDivisionError"),
        ("model", lambda: 3, "model"),
        ("data", lambda split: None, "data"),
        ("optimizer", lambda params: "adam", "optimizer"),
        ("metric", lambda batch: "good", "metric"),
    ],
)
def test_a_job_that_fails_says_which_part_and_where(field, value, message, tmp_path):
    """Errors of the user's own functions come out as one message with the field."""
    with pytest.raises((JobError, HalfstepError), match=message):
        train(tiny_job(**{field: value}), TrainConfig(batch=16, epochs=1), precision="fp32", out=tmp_path / "run")


def test_a_bad_device_is_refused(tmp_path):
    """A device torch does not know is named."""
    with pytest.raises(HalfstepError, match="device='gpu'"):
        train(tiny_job(), TrainConfig(batch=16, epochs=1, device="gpu"), precision="fp32", out=tmp_path / "run")


# --- what ends a run early costs nothing ------------------------------------------------------------------------


def fails_once(field):
    """A metric or validation split that fails the first time it is used."""
    calls = []

    def fail():
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("val")

    if field == "metric":
        return {"metric": lambda model, batch: (fail(), 0.5)[1]}
    plain = tiny_job().data
    return {"data": lambda batch_size, split: (split == "val" and fail(), plain(batch_size, split))[1]}


@pytest.mark.parametrize("field", ["metric", "data"])
@pytest.mark.parametrize("save_every", [None, 3])
def test_a_validation_that_fails_does_not_cost_the_epoch(field, save_every, tmp_path):
    """The epoch is saved first; after a fix, --resume validates it and continues as if nothing had happened."""
    config = TrainConfig(batch=16, epochs=2, save_every=save_every)
    job = tiny_job(**fails_once(field))
    with pytest.raises(JobError, match="KeyError: 'val'"):
        train(job, config, precision="fp32", out=tmp_path / "run")
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").latest().name == "step-00000004"
    resumed = train(job, config, precision="fp32", out=tmp_path / "run", resume=True)
    epochs = [e["epoch"] for e in read_runlog(tmp_path / "run" / "run.jsonl").events if e["event"] == "validation"]
    assert epochs == [0, 1]
    plain = train(tiny_job(), config, precision="fp32", out=tmp_path / "plain")
    a, b = weights_of(plain), weights_of(resumed)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_signal_during_validation_ends_it_at_once_and_the_run_resumes_with_it(tmp_path):
    """One batch of the split is used, the epoch is saved, and the resumed run validates it from the start."""
    used = []

    def metric(model, batch, epoch):
        used.append(epoch)
        if len(used) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return 0.5

    config = TrainConfig(batch=8, epochs=2)
    stopped = train(tiny_job(metric=metric), config, precision="fp32", out=tmp_path / "run")
    assert (stopped.stopped_by, stopped.steps, used) == ("SIGINT", 8, [0])
    assert stopped.checkpoint.name == "step-00000008"
    train(tiny_job(metric=metric), config, precision="fp32", out=tmp_path / "run", resume=True)
    assert used == [0] + [0] * 4 + [1] * 4


def test_a_second_signal_does_not_cost_the_checkpoint(tmp_path):
    """Two signals within one step still end in a checkpoint of that step."""

    def loss(model, batch):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        return F.cross_entropy(model(batch[0]), batch[1])

    outcome = train(tiny_job(loss=loss), TrainConfig(batch=16, epochs=2), precision="fp32", out=tmp_path / "run")
    assert (outcome.stopped_by, outcome.steps) == ("SIGINT", 1)
    assert outcome.checkpoint.name == "step-00000001"


@pytest.mark.parametrize("stop_first", [False, True])
def test_data_that_fails_between_two_steps_does_not_cost_the_steps_before(stop_first, tmp_path):
    """They are saved before the error is raised; after a signal, which also reaches data workers, it is a plain stop."""
    plain = tiny_job().data

    def data(batch_size, split):
        for number, batch in enumerate(plain(batch_size, split)):
            if number == 3 and split == "train":
                if stop_first:
                    os.kill(os.getpid(), signal.SIGTERM)
                raise OSError("disk gone")
            yield batch

    run = {"precision": "fp32", "out": tmp_path / "run"}
    if stop_first:
        assert train(tiny_job(data=data), TrainConfig(batch=16, epochs=1), **run).stopped_by == "SIGTERM"
    else:
        with pytest.raises(JobError, match="disk gone"):
            train(tiny_job(data=data), TrainConfig(batch=16, epochs=1), **run)
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").latest().name == "step-00000003"


@pytest.mark.parametrize("fault", ["schedule", "overflow"])
def test_a_step_that_ends_the_run_is_saved(fault, tmp_path):
    """A scheduler beyond its end, or gradients that are never finite, do not cost the steps before."""
    changed = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)}
    if fault == "overflow":
        changed = {"loss": lambda model, batch: model(batch[0]).sum() * math.nan}
    config = TrainConfig(batch=1, epochs=4)
    with pytest.raises(HalfstepError if fault == "schedule" else OverflowStop):
        train(
            tiny_job(metric=None, **changed, model=lambda: torch.nn.Linear(6, 3)),
            config,
            precision="fp32",
            out=tmp_path,
        )
    latest = CheckpointFolder(tmp_path / "checkpoints").latest()
    assert latest.name == ("step-00000003" if fault == "schedule" else "step-00000100")


# --- runs that did not train -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (lambda model, batch: model(batch[0]).sum() * float("nan"), "all 4 steps were skipped"),
        (
            lambda model, batch, split: (
                F.cross_entropy(model(batch[0]), batch[1]) + (math.inf if split == "val" else 0)
            ),
            "the validation loss is inf",
        ),
        (
            lambda model, batch, split: (
                F.cross_entropy(model(batch[0]), batch[1]) + (math.inf if split == "train" else 0)
            ),
            "the training loss is inf",
        ),
        (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), None),
    ],
)
def test_a_run_that_did_not_train_has_a_problem(loss, problem, tmp_path):
    """All steps skipped, or a loss that is not finite at the end, is not a success."""
    config = TrainConfig(batch=16, epochs=1)
    outcome = train(tiny_job(loss=loss), config, precision="fp32", out=tmp_path / "run")
    assert problem is None if outcome.problem is None else outcome.problem.startswith(problem)


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean", "bf16-lean,master=fp32"])
def test_weights_that_stop_being_finite_are_written_aside(precision, tmp_path):
    """The last healthy checkpoint stays the one to resume from, and the outcome has the reason."""
    spoiled = []

    def loss(model, batch, epoch):
        if epoch == 1 and not spoiled:
            spoiled.append(1)
            with torch.no_grad():
                model[0].bias[0] = float("nan")
        return model(batch[0]).square().mean()

    job = tiny_job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)), loss=loss, metric=None
    )
    config = TrainConfig(batch=16, epochs=2, keep_last=1, keep_best=0)
    outcome = train(job, config, precision=precision, out=tmp_path / "run")
    assert "weights are not finite (in 0.bias" in outcome.problem
    assert outcome.checkpoint.name == "step-00000004"
    assert (tmp_path / "run" / "checkpoints" / "nonfinite-00000008").is_dir()
    resumed = train(job, config, precision=precision, out=tmp_path / "run", resume=True)
    assert (resumed.problem, resumed.steps) == (None, 8)


# --- settings and generators -----------------------------------------------------------------------------------


def test_the_batch_size_of_the_jobs_signature_is_its_default(tmp_path):
    """A setting overrides it; a job without one gets 64."""
    plain, sizes = tiny_job().data, []

    def data(split, batch_size=16):
        sizes.append(batch_size)
        return plain(batch_size, split)

    for number, (field, config) in enumerate(
        [(data, TrainConfig(steps=1)), (data, TrainConfig(steps=1, batch=8)), (plain, TrainConfig(steps=1))]
    ):
        train(tiny_job(data=field), config, precision="fp32", out=tmp_path / str(number))
    assert set(sizes[:2]) == {16}
    assert set(sizes[2:]) == {8}
    assert read_runlog(tmp_path / "0" / "run.jsonl").header["config"]["batch"] == 16
    assert read_runlog(tmp_path / "2" / "run.jsonl").header["config"]["batch"] == 64


def test_every_generator_is_seeded(tmp_path):
    """Jobs that draw from Python's or NumPy's generator repeat, too."""
    drawn = []

    def model():
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))  # noqa: NPY002 - as jobs do
        return torch.nn.Linear(6, 3)

    for number in range(2):
        config = TrainConfig(batch=16, steps=1, seed=3)
        train(tiny_job(model=model), config, precision="fp32", out=tmp_path / str(number))
    assert drawn[0] == drawn[1]


def test_a_resumed_run_records_its_own_truth_table(tmp_path):
    """Another machine or precision may resume a run, so each process records the table after its first step."""
    for steps in (2, 4):
        train(tiny_job(), TrainConfig(batch=16, steps=steps), precision="fp32", out=tmp_path, resume=steps == 4)
    events = read_runlog(tmp_path / "run.jsonl").events
    assert [e["truth"]["rows"]["gradients"] for e in events if e["event"] == "truth"] == ["fp32", "fp32"]


@pytest.mark.parametrize(
    "changed",
    [
        {"data": lambda: [(torch.randn(4, 6), torch.zeros(4).long())], "metric": None},
        {"data": lambda split: None if split == "val" else [(torch.randn(4, 6), torch.zeros(4).long())]},
    ],
    ids=["no split argument", "None"],
)
def test_a_job_without_validation_trains(changed, tmp_path):
    """It has no values, and no problem."""
    outcome = train(tiny_job(**changed), TrainConfig(epochs=2), precision="fp32", out=tmp_path / "run")
    assert (outcome.validation, outcome.problem, outcome.steps) == ({}, None, 2)


# --- real processes -------------------------------------------------------------------------------------------

# `tiny_job` as a file, which can count its own progress. With KILL_AT=n its process dies by SIGKILL right before its n-th
# event: a loss, or a call that touches the run's directory. No clock is involved, so any machine dies at the same place.
JOB_FILE = """
import os, signal, sys
from test_loop import tiny_job

job = tiny_job()
kill_at = int(os.environ.get("KILL_AT", "0"))
events = 0

def count():
    global events
    events += 1
    if events == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

def audit(event, args):
    if event in {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"} and os.environ["RUN"] in str(args[0]):
        count()

def loss(model, batch):
    count()
    return tiny_loss(model, batch)

if kill_at:
    sys.addaudithook(audit)
tiny_loss = job.loss
job = tiny_job(loss=loss)
"""
HANG_SECONDS = 600  # only a process that hangs takes as long


def train_command(out, precision, *, resume, epochs, kill_at=0, settings=()):
    """The arguments of `halfstep`, and the environment variables, of a run."""
    job = out.parent / "job.py"
    job.write_text(JOB_FILE)
    arguments = ["train", str(job), "--out", str(out), "--epochs", str(epochs), "--json"]
    arguments += ["--batch", "16", "--set", "save_every=2", "--precision", precision, *["--resume"] * resume]
    arguments += [part for setting in settings for part in ("--set", setting)]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return arguments, {"OMP_NUM_THREADS": "1", "KILL_AT": str(kill_at), "RUN": str(out), "PYTHONPATH": path}


@contextlib.contextmanager
def start(out, precision, **options):
    """A real `halfstep train`, which does not outlive the block."""
    arguments, variables = train_command(out, precision, **options)
    command, env = [sys.executable, "-m", "halfstep", *arguments], os.environ | variables
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def run_command(out, precision, **options):
    """The exit code and the output of a `halfstep train`."""
    with start(out, precision, **options) as process:
        output = process.communicate(timeout=HANG_SECONDS)
    return process.returncode, *output


def num_lines(out):
    path = out / "run.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def kill_and_resume(tmp_path, precision, kills, seed, epochs, settings=()):
    """Train with SIGKILLs at random points of training and saving, and once without; the number of kills."""
    rng = random.Random(seed)
    out = tmp_path / "killed"
    killed = 0
    while True:
        saved = (out / "checkpoints").exists()
        resume = saved or (out / "run.jsonl").exists()  # a run may die before its first checkpoint
        kill_at = rng.randint(20, 90) if killed < kills else 0
        code, stdout, stderr = run_command(
            out, precision, resume=resume, epochs=epochs, kill_at=kill_at, settings=() if saved else settings
        )
        assert "Traceback" not in stderr, stderr
        if code == 0:
            break
        assert code == -signal.SIGKILL, stderr
        killed += 1
    code, plain_stdout, stderr = run_command(tmp_path / "plain", precision, resume=False, epochs=epochs)
    assert code == 0, stderr
    assert json.loads(stdout)["steps"] == json.loads(plain_stdout)["steps"] == 4 * epochs
    a, b = (
        masters_of(load_checkpoint(CheckpointFolder(tmp_path / n / "checkpoints").latest()))
        for n in ("plain", "killed")
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    losses = [[r["loss"] for r in read_runlog(tmp_path / n / "run.jsonl").records] for n in ("plain", "killed")]
    assert losses[0] == losses[1]
    return killed


@pytest.mark.slow
def test_sigkill_and_resume_equal_an_uninterrupted_run(tmp_path):
    """Two kills of a real process: weights and losses equal the run that was never killed."""
    assert kill_and_resume(tmp_path, "fp16-lean", kills=2, seed=0, epochs=6) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_sigkill_while_checkpoints_are_saved_in_the_background(tmp_path):
    """The same with async_save."""
    settings = ("async_save=true",)
    assert kill_and_resume(tmp_path, "fp16-lean", kills=2, seed=0, epochs=6, settings=settings) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "precision"), list(enumerate(["fp32", "bf16", "fp16", "bf16-lean", "fp16-lean"])))
@pytest.mark.usefixtures("forked")
def test_sigkill_twenty_times(seed, precision, tmp_path):
    """Four kills in each preset, twenty in all, at random points of training and of saving."""
    assert kill_and_resume(tmp_path, precision, kills=4, seed=seed, epochs=10) == 4


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_signal_finishes_the_step_saves_and_reports_it(number, code, tmp_path):
    """Exit code 130 or 143, a line that names the checkpoint, and a run that can be resumed."""
    out = tmp_path / "run"
    with start(out, "bf16", resume=False, epochs=1_000_000) as process:
        while num_lines(out) < 8 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == code, stderr
    outcome = json.loads(stdout)
    assert outcome["stopped_by"] == number.name
    assert f"Stopped by {number.name}" in stderr
    assert load_checkpoint(outcome["checkpoint"]).state["engine"]["counters"]["attempts"] == outcome["steps"]


def test_only_a_validated_checkpoint_has_a_score(tmp_path):
    """Between validations a checkpoint does not inherit the last one's metric, and is not the best by it."""
    scores = [0.1, 0.9, 0.2, 0.3]
    job = tiny_job(metric=lambda model, batch, epoch: scores[epoch])
    config = TrainConfig(batch=16, epochs=4, eval_every=2, keep_last=4)
    train(job, config, precision="fp32", out=tmp_path)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert [entry.metric for entry in folder.checkpoints()] == [None, pytest.approx(0.9), None, pytest.approx(0.3)]
    assert folder.best().name == "step-00000008"


@pytest.mark.parametrize("device", ["cuda:99", "meta", "xla", "nonsense"])
def test_a_device_that_is_not_here_is_refused(device, tmp_path):
    """The message says which there are, before anything is built or written."""
    with pytest.raises(HalfstepError, match=f"device='{device}' is (not available|an unknown device)"):
        train(tiny_job(), TrainConfig(steps=1, device=device), precision="fp32", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- schedulers that depend on validation ----------------------------------------------------------------------


def plateau_job(**changed):
    """A job whose metric never improves, so that ReduceLROnPlateau divides the rate by 10 after every validation."""
    scheduler = lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)  # noqa: E731
    return tiny_job(**({"scheduler": scheduler, "metric": lambda batch: 1.0} | changed))


def rates(out):
    return [record["lr"] for record in read_runlog(out / "run.jsonl").records]


@pytest.mark.parametrize("metric", [lambda batch: 1.0, None], ids=["metric", "loss"])
def test_a_plateau_scheduler_is_stepped_with_each_validation(metric, tmp_path):
    """With the metric, or the loss of a job without one; the first validation only sets the best value."""
    loss = lambda model, batch, split: F.cross_entropy(model(batch[0]), batch[1]) * (split == "train") + 1  # noqa: E731
    train(plateau_job(metric=metric, loss=loss), TrainConfig(batch=32, epochs=4), precision="fp32", out=tmp_path)
    assert rates(tmp_path) == pytest.approx([1e-2] * 4 + [1e-3] * 2 + [1e-4] * 2)


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_with_a_plateau_scheduler_resumes_with_the_same_rates(fails, tmp_path):
    """Whether the process ended after its last validation or in the middle of it."""
    calls = []

    def metric(batch):
        calls.append(1)
        if fails and len(calls) == 3:
            raise ValueError("once")
        return 1.0

    job, run = plateau_job(metric=metric), {"precision": "fp32", "out": tmp_path / "run"}
    if fails:
        with pytest.raises(JobError, match="once"):
            train(job, TrainConfig(batch=32, epochs=4), **run)
    else:
        train(job, TrainConfig(batch=32, epochs=3), **run)
    resumed = train(job, TrainConfig(batch=32, epochs=4), resume=True, **run)
    plain = train(plateau_job(), TrainConfig(batch=32, epochs=4), precision="fp32", out=tmp_path / "plain")
    assert rates(tmp_path / "run") == rates(tmp_path / "plain")
    a, b = weights_of(plain), weights_of(resumed)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: [(torch.randn(4, 6), torch.zeros(4).long())], "has no `split` argument"),
        (lambda split: None if split == "val" else [(torch.randn(4, 6), torch.zeros(4).long())], "returned None"),
    ],
)
def test_a_plateau_scheduler_without_validation_is_an_error(data, reason, tmp_path):
    """It would never be stepped."""
    with pytest.raises(HalfstepError, match=f"ReduceLROnPlateau is stepped .*{reason}"):
        train(plateau_job(data=data), TrainConfig(epochs=2), precision="fp32", out=tmp_path)


def test_a_skipped_step_has_an_autopsy_in_the_run_file(tmp_path):
    """A NaN datum is named as such, with the module that received it."""
    poisoned = []

    def loss(model, batch):
        x, y = batch
        if len(poisoned) == 0 and model.training:
            x[0, 0] = math.nan
            poisoned.append(x)
        return F.cross_entropy(model(x), y)

    outcome = train(tiny_job(loss=loss), TrainConfig(batch=16, steps=3), precision="fp16", out=tmp_path / "run")
    run = read_runlog(tmp_path / "run" / "run.jsonl")
    (event,) = [e for e in run.events if e["event"] == "autopsy"]
    assert (event["data"]["cause"], event["data"]["module"], event["step"]) == ("data", "0", 1)
    assert event["message"]
    assert outcome.skips == 1
