"""`--set optimizer=...`: the text, what is taken over from the job's optimizer, and a run on two ranks."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from halfstep.errors import SettingError
from halfstep.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from halfstep.train import TrainConfig
from halfstep.train.optimizer import replace_optimizer
from rank_processes import free_port


def job_optimizer():
    """AdamW with two groups."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 3)
    groups = [{"params": first.parameters(), "lr": 1e-2}, {"params": second.parameters(), "weight_decay": 0.5}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.95))


def test_groups_and_settings_are_taken_over():
    """Each group keeps its rate, betas and decay; settings of the text are the new optimizer's."""
    job = job_optimizer()
    optimizer = replace_optimizer("onebit-adam, freeze_step=7, allow_unverified=true", job)
    assert type(optimizer) is OneBitAdam
    assert optimizer.policy.freeze_step == 7
    assert optimizer.allow_unverified is True
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (1e-2, (0.8, 0.95), 0.01),
        (3e-3, (0.8, 0.95), 0.5),
    ]
    assert [g["params"] for g in optimizer.param_groups] == [g["params"] for g in job.param_groups]


def test_a_setting_of_the_text_replaces_the_jobs():
    """`lr` in the text is that of all groups, and without freeze_step the variance decides."""
    optimizer = replace_optimizer("onebit-lamb,lr=0.5", job_optimizer())
    assert type(optimizer) is OneBitLamb
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.5]
    assert optimizer.policy.freeze_step is None
    assert type(replace_optimizer("zero-one-adam,var_freeze_step=9", job_optimizer())) is ZeroOneAdam


@pytest.mark.parametrize(
    "text", ["adam", "onebit-adam,freeze=3", "onebit-adam,freeze_step", "onebit-adam,compute=fp16"]
)
def test_a_wrong_text_is_rejected_with_the_settings(text):
    """Unknown names, unknown settings, settings without a value, and what the Engine sets."""
    with pytest.raises(SettingError):
        TrainConfig(optimizer=text)


def test_an_optimizer_without_betas_is_rejected():
    """SGD has nothing that Adam could continue with."""
    with pytest.raises(SettingError, match="no betas"):
        replace_optimizer("onebit-adam", torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_digits_on_two_ranks(tmp_path):
    """The command of docs/one-bit.md, for a few steps: it trains, compresses, and the resumed run continues."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["--precision", "fp16", "--set", "optimizer=onebit-adam,freeze_step=4", "--out", str(tmp_path / "run")]

    def train(*more):
        command = [*launch, "--master-port", str(free_port()), "-m", "halfstep", "train", *more, *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=500, env=environment)

    result = train("digits", "--steps", "8", "--batch", "16", "--set", "eval_batches=2")
    assert "1-bit Adam on 2 ranks" in result.stderr + result.stdout
    result = train("--resume", "--steps", "10", "--batch", "16", "--set", "eval_batches=2")
    assert "compressed since step 4" in result.stderr + result.stdout
