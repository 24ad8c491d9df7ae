"""What the kernels of regions leave behind."""

import torch

from halfstep.engine.region import kernels
from halfstep.engine.region.rule import Rule, rule_in_thread


def test_a_kernel_that_is_called_with_autocast_off_leaves_it_off():
    """torch calls Python kernels directly when it traces; autocast is off by the key that a kernel excludes."""
    kernel = dict(kernels._kernels("cpu"))["exp"]
    keys = torch._C._dispatch_keys(torch.ones(2))
    with rule_in_thread(Rule.LEAN, None):
        assert torch.equal(kernel(keys, torch.zeros(2)), torch.ones(2))
    assert not torch.is_autocast_enabled("cpu")
