"""Lion in the fused step: a tensor's factors for one step, and the update of one block.

`kernels.lion` is the readable reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfstep.kernels.lion import LionColumn
from halfstep.kernels.table import NUM_FACTORS, NUM_SETTINGS

__all__ = ["lion_factors_kernel", "lion_update"]

_LR, _BETA1, _BETA2, _WEIGHT_DECAY, _MAXIMIZE = (tl.constexpr(int(c)) for c in LionColumn)
_NUM_SETTINGS, _NUM_FACTORS = tl.constexpr(NUM_SETTINGS), tl.constexpr(NUM_FACTORS)

# Columns of the fp32 table of a tensor's factors:
_OF_GRAD = tl.constexpr(0)  # 1 / divisor, negative to maximize
_OF_MASTER = tl.constexpr(1)  # weight decay
_MOMENT_IN_DIRECTION = tl.constexpr(2)  # beta1
_GRAD_IN_DIRECTION = tl.constexpr(3)  # 1 - beta1
_KEEP_MOMENT = tl.constexpr(4)  # beta2
_ADD_MOMENT = tl.constexpr(5)  # 1 - beta2
_OF_SIGN = tl.constexpr(6)  # lr


@triton.jit(do_not_specialize=["num_tensors"], do_not_specialize_on_alignment=["divisor", "found_inf"])
def lion_factors_kernel(
    settings,  # float64 (G, 7): columns of LionColumn, the others unused
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
    beta1 = tl.load(row + _BETA1, mask=there, other=0.0)
    beta2 = tl.load(row + _BETA2, mask=there, other=0.0)
    weight_decay = tl.load(row + _WEIGHT_DECAY, mask=there, other=0.0)
    maximize = tl.load(row + _MAXIMIZE, mask=there, other=0.0)
    step = tl.load(steps + tensor, mask=there, other=0.0) + 1
    out = factors + tensor * _NUM_FACTORS
    tl.store(out + _OF_GRAD, ((1 - 2 * maximize) / tl.load(divisor)).to(tl.float32), mask=there)
    tl.store(out + _OF_MASTER, (1 - lr * weight_decay).to(tl.float32), mask=there)
    tl.store(out + _MOMENT_IN_DIRECTION, beta1.to(tl.float32), mask=there)
    tl.store(out + _GRAD_IN_DIRECTION, (1 - beta1).to(tl.float32), mask=there)
    tl.store(out + _KEEP_MOMENT, beta2.to(tl.float32), mask=there)
    tl.store(out + _ADD_MOMENT, (1 - beta2).to(tl.float32), mask=there)
    tl.store(out + _OF_SIGN, lr.to(tl.float32), mask=there)
    if tl.load(found_inf) == 0:
        tl.store(steps + tensor, step, mask=there)


@triton.jit
def lion_update(master, grad, exp_avg, factors):
    """One Lion step on fp32 blocks: the new master and moment."""
    grad = grad * tl.load(factors + _OF_GRAD)
    direction = exp_avg * tl.load(factors + _MOMENT_IN_DIRECTION) + grad * tl.load(factors + _GRAD_IN_DIRECTION)
    sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, direction * 0.0))  # NaN stays NaN
    master = master * tl.load(factors + _OF_MASTER) - sign * tl.load(factors + _OF_SIGN)
    return master, exp_avg * tl.load(factors + _KEEP_MOMENT) + grad * tl.load(factors + _ADD_MOMENT)
