"""What the kernels of regions leave behind."""

import subprocess
import sys

import torch

from halfstep.engine.region import kernels
from halfstep.engine.region.rule import Rule, rule_in_thread


def test_a_kernel_that_is_called_with_autocast_off_leaves_it_off():
    """torch calls Python kernels directly when it traces; autocast is off by the key that a kernel excludes."""
    kernel = dict(kernels._kernels("cpu", lean=False))["exp"]
    keys = torch._C._dispatch_keys(torch.ones(2))
    with rule_in_thread(Rule.LEAN, None):
        assert torch.equal(kernel(keys, torch.zeros(2)), torch.ones(2))
    assert not torch.is_autocast_enabled("cpu")


def test_operations_that_only_lean_regions_treat_differently_stay_torchs_own_until_one_is_entered():
    """A process with autocast presets only runs no Python in its layer norms on a GPU, nor in its divisions and means."""
    code = """
import torch
from halfstep.engine.region import compute_region, has_kernel, kernels
only_lean = [name for name, _ in kernels._kernels("cpu", lean=True)]
registered = lambda: [has_kernel(f"aten::{name}", "AutocastCPU") for name in only_lean]
before = registered()
with compute_region("cpu", "bf16"):
    assert registered() == before == [False] * len(only_lean)
with compute_region("cpu", "bf16", lean=True):
    assert all(registered())
assert {"mean", "div.Tensor"} <= set(only_lean)
assert "layer_norm" in [name for name, _ in kernels._kernels("cuda", lean=True)]
print("checked")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "checked\n", done.stderr
