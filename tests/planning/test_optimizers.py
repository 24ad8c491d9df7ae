"""What optimizers allocate."""

import pytest
import torch

from halfstep.kernels.table import table_bytes
from halfstep.optim import OneBitAdam
from halfstep.planning.estimator import Estimator
from halfstep.precision.policy import Policy
from planning_jobs import small_job

NUM = 16 * 64 + 64 + 64 * 4 + 4


def states(optimizer, precision="fp32"):
    """Bytes of states of the small job under an optimizer."""
    return Estimator(small_job(optimizer=optimizer), Policy.parse(precision)).at(8).peak.breakdown.get("states", 0)


@pytest.mark.parametrize(
    ("optimizer", "each"),
    [
        (lambda params: torch.optim.SGD(params, lr=1), 0),
        (lambda params: torch.optim.SGD(params, lr=1, momentum=0.9), 4),
        (torch.optim.RMSprop, 4),
        (torch.optim.AdamW, 8),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), 12),
        (OneBitAdam, 12),  # with the compression errors, which exist from the freeze on
    ],
)
def test_bytes_per_parameter(optimizer, each):
    """Known and unknown optimizers are counted by the states they really make."""
    assert each * NUM <= states(optimizer) <= each * NUM + 64


def test_8_bit_states_are_a_byte_each_and_scales():
    """8-bit moments are a byte per parameter in whole blocks of 256 and four per block, with the kernels' tables."""
    moments = 2 * (256 + 4) * sum(-(-n // 256) for n in (16 * 64, 64, 64 * 4, 4))
    predicted = states(torch.optim.AdamW, "bf16-lean,states=8bit")
    tables = table_bytes([16 * 64, 64, 64 * 4, 4], torch.int8)
    assert predicted == moments + tables


def test_foreach_step_allocates_temporaries():
    """An optimizer that torch steps by foreach has temporaries in its step; a fused one has none."""
    plain, fused = (
        Estimator(small_job(optimizer=o), Policy.parse("fp32")).trace(8).ledger.events
        for o in (torch.optim.RMSprop, torch.optim.AdamW)
    )
    temporaries = [sum(e.num_bytes or 0 for e in lines if e.phase == "step") for lines in (plain, fused)]
    assert temporaries[0] > 4 * NUM
    assert temporaries[1] == 0


def test_every_block_is_allocated_once_and_freed():
    """A plain optimizer's first step, which is discarded, leaves no event behind that belongs to another block."""
    events = Estimator(small_job(optimizer=torch.optim.RMSprop), Policy.parse("bf16")).trace(8).ledger.events
    allocated = [e.block for e in events if e.num_bytes is not None]
    freed = [e.block for e in events if e.num_bytes is None]
    assert len(set(allocated)) == len(allocated)
    assert sorted(freed) == sorted(allocated)
