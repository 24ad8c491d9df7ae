"""What a run records of its Watch: samples, events and autopsies in the run file, and a summary; the run itself is unchanged."""

import pytest
import torch
import torch.nn.functional as F

from halfstep.checkpoint.directory import load_checkpoint
from halfstep.checkpoint.export import masters_of
from halfstep.checkpoint.runlog import read_runlog
from halfstep.errors import SettingError
from halfstep.jobs.job import Job
from halfstep.report.numerics.view import view_of
from halfstep.train import TrainConfig, train


def job(bad_batch=None):
    """A small classifier with dropout; the batch with this number contains a NaN."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(96, 6, generator=g), torch.randint(0, 3, (96,), generator=g)
    if bad_batch is not None:
        x[16 * bad_batch, 2] = float("nan")
    layers = (torch.nn.Linear(6, 16), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    return Job(
        model=lambda: torch.nn.Sequential(*layers),
        data=lambda batch_size: list(zip(x.split(batch_size), y.split(batch_size), strict=True)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    )


def run(out, precision="fp32", bad_batch=None, **config):
    torch.manual_seed(0)
    outcome = train(job(bad_batch), TrainConfig(batch=16, epochs=1, **config), precision=precision, out=out)
    return outcome, read_runlog(out / "run.jsonl")


def test_samples_are_in_the_run_file(tmp_path):
    """At steps 1, 2 and 4 of six, each with gradients, weights and updates of every parameter."""
    outcome, log = run(tmp_path)
    samples = [event for event in log.events if event["event"] == "numerics"]
    assert [sample["step"] for sample in samples] == [1, 2, 4]
    assert (
        samples[0]["gradients"].keys() == samples[0]["updates"].keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
    )
    rows = view_of(log).rows
    assert {row.kind for row in rows} == {"gradient", "weight"}
    assert sum(rows[0].bins.values()) + rows[0].zeros * rows[0].numel == rows[0].numel
    assert outcome.numerics[0].startswith("watched")


def test_a_watch_that_is_off_records_nothing(tmp_path, monkeypatch):
    """No sample, no line in the summary, and no remark that a replay has no effect."""
    remarks = []
    monkeypatch.setattr("halfstep.engine.replay.record.log_once", remarks.append)
    outcome, log = run(tmp_path, watch=None)
    assert not remarks
    assert not [event for event in log.events if event["event"] == "numerics"]
    assert outcome.numerics == ()


def test_watching_does_not_change_a_run(tmp_path):
    """Weights are bit-identical with and without samples, dropout and a skipped step included."""
    weights = []
    for name, every in (("with", 1), ("without", None)):
        outcome, _ = run(tmp_path / name, precision="fp16", bad_batch=3, watch=every)
        weights.append(masters_of(load_checkpoint(outcome.checkpoint)))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_nan_in_the_data_is_found_by_an_autopsy(tmp_path):
    """The event names the cause and the step, and is not blamed on the scale."""
    _, log = run(tmp_path, precision="fp16", bad_batch=3)
    (autopsy,) = [event for event in log.events if event["event"] == "autopsy"]
    assert (autopsy["step"], autopsy["data"]["cause"]) == (4, "data")
    assert autopsy["message"]
    assert [event.kind for event in view_of(log).events].count("autopsy") == 1


@pytest.mark.parametrize("every", [0, -1, True])
def test_an_interval_that_makes_no_sense_is_rejected(every):
    """It is a number of steps."""
    with pytest.raises(SettingError, match="watch"):
        TrainConfig(watch=every)
