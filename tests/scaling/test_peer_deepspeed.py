"""Faults of DeepSpeed, shown with DeepSpeed itself where it is installed; tests/engine shows that Halfstep has none."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rank_processes import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="Requires: [deepspeed]"),
]


def run(precision, accumulate, steps):
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "deepspeed_peer.py"),
        precision,
        str(free_port()),
        str(accumulate),
        str(steps),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_deepspeed_halves_the_gradient_of_the_step_on_which_its_scale_grows():
    """With a window of 3 the fourth step, where the scale doubles, applies half of the gradient."""
    assert run("fp16", 1, 5) == [1.0, 1.0, 1.0, 0.5, 1.0]


def test_deepspeed_accumulates_bf16_gradients_in_bf16_until_they_stagnate():
    """The mean of 1024 gradients of 1 is 0.25."""
    assert run("bf16", 1024, 1) == [0.25]
