"""torchdata's StatefulDataLoader in a run: its state is part of the checkpoint, and a resumed run is bit-identical."""

import pytest
import torch
import torch.nn.functional as F

from halfstep.checkpoint.directory import load_checkpoint
from halfstep.jobs.job import Job
from halfstep.train.config import TrainConfig
from halfstep.train.loop import train

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="Requires: [torchdata]")

# torchdata 0.11 calls a function that torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

INPUTS = torch.linspace(-1, 1, 22).reshape(-1, 1)


def job():
    dataset = torch.utils.data.TensorDataset(INPUTS, INPUTS.sin())
    return Job(
        model=lambda: torch.nn.Linear(1, 1),
        data=lambda batch_size: stateful.StatefulDataLoader(dataset, batch_size, shuffle=True),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
    )


def test_a_run_resumes_with_the_loaders_own_state(tmp_path):
    """Stopped in the second epoch of six batches, and continued to the third: the weights of an undisturbed run."""
    settings = {"batch": 4, "device": "cpu", "save_every": 2, "watch": None}
    whole = train(job(), TrainConfig(steps=14, **settings), precision="fp32", out=tmp_path / "whole")
    train(job(), TrainConfig(steps=8, **settings), precision="fp32", out=tmp_path / "parts")
    again = train(job(), TrainConfig(steps=14, **settings), precision="fp32", out=tmp_path / "parts", resume=True)
    saved = load_checkpoint(again.checkpoint)
    assert saved.state["extra"]["data"]["loader"] is not None
    expected = load_checkpoint(whole.checkpoint).weights
    assert saved.weights.keys() == expected.keys()
    assert all(torch.equal(saved.weights[name], expected[name]) for name in expected)
