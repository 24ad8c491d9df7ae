"""SGD in the fused step: a tensor's factors for one step, and the update of one block.

`kernels.sgd` is the readable reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfstep.kernels.sgd import SGDColumn
from halfstep.kernels.table import NUM_FACTORS, NUM_SETTINGS

__all__ = ["sgd_factors_kernel", "sgd_update"]

_LR, _MOMENTUM, _DAMPENING, _WEIGHT_DECAY, _NESTEROV, _MAXIMIZE, _HAS_MOMENTUM = (
    tl.constexpr(int(c)) for c in SGDColumn
)
_NUM_SETTINGS, _NUM_FACTORS = tl.constexpr(NUM_SETTINGS), tl.constexpr(NUM_FACTORS)

# Columns of the fp32 table of a tensor's factors:
_OF_GRAD = tl.constexpr(0)  # 1 / divisor, negative to maximize
_OF_MASTER = tl.constexpr(1)  # always 1; not read
_L2 = tl.constexpr(2)  # weight decay in the gradient
_KEEP_BUFFER = tl.constexpr(3)  # momentum; 0 in the first step
_ADD_BUFFER = tl.constexpr(4)  # 1 - dampening; 1 in the first step
_GRAD_IN_DIRECTION = tl.constexpr(5)
_BUFFER_IN_DIRECTION = tl.constexpr(6)
_OF_DIRECTION = tl.constexpr(7)  # lr


@triton.jit(do_not_specialize=["num_tensors"], do_not_specialize_on_alignment=["divisor", "found_inf"])
def sgd_factors_kernel(
    settings,  # float64 (G, 7): columns of SGDColumn
    group_of,  # int32 (T,)
    steps,  # fp32 (T,): steps applied so far, advanced here
    divisor,  # fp32 ()
    found_inf,  # fp32 ()
    factors,  # fp32 (T, 10)
    num_tensors,
    BLOCK: tl.constexpr,
):
    """Advance the step counts unless the flag is set, and compute each tensor's factors for this step."""
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tensor < num_tensors
    row = settings + tl.load(group_of + tensor, mask=there, other=0) * _NUM_SETTINGS
    lr = tl.load(row + _LR, mask=there, other=0.0)
    momentum = tl.load(row + _MOMENTUM, mask=there, other=0.0)
    dampening = tl.load(row + _DAMPENING, mask=there, other=0.0)
    nesterov = tl.load(row + _NESTEROV, mask=there, other=0.0)
    has_momentum = tl.load(row + _HAS_MOMENTUM, mask=there, other=0.0)
    step = tl.load(steps + tensor, mask=there, other=0.0) + 1
    first = step == 1  # the first gradient enters undamped, as in torch
    out = factors + tensor * _NUM_FACTORS
    maximize = tl.load(row + _MAXIMIZE, mask=there, other=0.0)
    tl.store(out + _OF_GRAD, ((1 - 2 * maximize) / tl.load(divisor)).to(tl.float32), mask=there)
    tl.store(out + _OF_MASTER, (1 + 0 * lr).to(tl.float32), mask=there)
    tl.store(out + _L2, tl.load(row + _WEIGHT_DECAY, mask=there, other=0.0).to(tl.float32), mask=there)
    tl.store(out + _KEEP_BUFFER, tl.where(first, 0.0, momentum).to(tl.float32), mask=there)
    tl.store(out + _ADD_BUFFER, tl.where(first, 1.0, 1 - dampening).to(tl.float32), mask=there)
    tl.store(out + _GRAD_IN_DIRECTION, tl.where(has_momentum != 0, nesterov, 1.0).to(tl.float32), mask=there)
    tl.store(out + _BUFFER_IN_DIRECTION, tl.where(nesterov != 0, momentum, has_momentum).to(tl.float32), mask=there)
    tl.store(out + _OF_DIRECTION, lr.to(tl.float32), mask=there)
    if tl.load(found_inf) == 0:
        tl.store(steps + tensor, step, mask=there)


@triton.jit
def sgd_update(master, grad, buffer, factors):
    """One SGD step on fp32 blocks: the new master and momentum buffer."""
    grad = grad * tl.load(factors + _OF_GRAD) + master * tl.load(factors + _L2)
    buffer = buffer * tl.load(factors + _KEEP_BUFFER) + grad * tl.load(factors + _ADD_BUFFER)
    direction = grad * tl.load(factors + _GRAD_IN_DIRECTION) + buffer * tl.load(factors + _BUFFER_IN_DIRECTION)
    return master - direction * tl.load(factors + _OF_DIRECTION), buffer
