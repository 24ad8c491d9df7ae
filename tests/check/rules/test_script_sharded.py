"""HS127: plain scalers of a loop in another file, and those that a branch prefers to the sharded one."""

import pytest

from check_scripts import findings

RETURNED = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
def build(dtype):
    scaler = torch.amp.GradScaler("cuda", enabled=(dtype == torch.float16))
    return {returned}
def wrap(model):
    return FSDP(model)
"""
BRANCHES = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
def wrap(model, args):
    if args.engine == "fsdp":
        model = FSDP(model)
    return model
def build(args):
    scaler = None
    if {first}:
        scaler = torch.amp.GradScaler("cuda")
    elif args.engine == "fsdp":
        scaler = ShardedGradScaler()
    return scaler
"""


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        pytest.param(RETURNED.format(returned="scaler"), [4], id="returned"),
        pytest.param(RETURNED.format(returned="dtype"), [], id="not used"),
        pytest.param(BRANCHES.format(first="args.use_amp"), [11], id="plain scaler first"),
        pytest.param(BRANCHES.format(first="args.engine == 'ddp'"), [], id="plain scaler for another engine"),
    ],
)
def test_the_scaler_of_a_sharded_model_is_judged_where_it_is_created(text, lines):
    """The loop may be in another file; a branch that may run with FSDP must create the sharded scaler."""
    assert [f.line for f in findings(text, "HS127")] == lines
