"""A model that the user wrapped in DistributedDataParallel, on real gloo ranks."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from halfstep.backends import WrappedDDP
from halfstep.errors import SettingError
from halfstep.precision.policy import Policy

PROGRAM = Path(__file__).parents[1] / "ddp_program.py"


@pytest.mark.parametrize("fine", ["fp32", "tf32", "bf16", "fp16"])
def test_presets_with_fp32_weights_pass(fine):
    """The wrapper's buckets are fp32, as the weights are."""
    WrappedDDP().check(nn.Linear(2, 2), Policy.parse(fine))


@pytest.mark.parametrize(
    ("precision", "reason"),
    [("bf16-lean", "drift apart"), ("fp16-lean", "drift apart"), ("bf16,reduce=bf16", "no effect")],
)
def test_what_the_wrapper_cannot_carry_is_rejected(precision, reason):
    """Casting its weights, or another format for its sums, is an error."""
    with pytest.raises(SettingError, match=reason):
        WrappedDDP().check(nn.Linear(2, 2), Policy.parse(precision))


def test_gradients_cross_ranks_once_per_window():
    """Two gloo ranks, windows of four micro-batches: one reduction each, equal weights, rank and size known."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM], env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    lines = [rank.communicate(timeout=600)[0].splitlines()[-1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert lines == [
        "rank 0 of 2: 2 reductions in 2 windows, same weights",
        "rank 1 of 2: 2 reductions in 2 windows, same weights",
    ]
