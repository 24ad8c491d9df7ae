"""SGD and Lion in the fused step: a tensor's factors for this step, and the update of one block.

Both hold one moment and take one direction. `kernels.sgd` and `kernels.lion` are the readable references.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["lion_factors_kernel", "lion_update", "sgd_factors_kernel", "sgd_update"]


@triton.jit
def sgd_factors_kernel(
    hyper,  # float64 (G, 7): lr, momentum, dampening, weight_decay, nesterov, maximize, whether there is momentum
    group_of,  # int32 (T,)
    steps,  # fp32 (T,): steps applied so far, advanced here
    divisor,  # fp32 ()
    found_inf,  # fp32 ()
    factors,  # fp32 (T, 10)
    num_tensors,
    BLOCK: tl.constexpr,
):
    """Factors after the first two: l2, of the buffer, of the gradient in it; of both in the direction; lr."""
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tensor < num_tensors
    row = hyper + 7 * tl.load(group_of + tensor, mask=there, other=0)
    lr = tl.load(row, mask=there, other=0.0)
    momentum = tl.load(row + 1, mask=there, other=0.0)
    dampening = tl.load(row + 2, mask=there, other=0.0)
    nesterov = tl.load(row + 4, mask=there, other=0.0)
    has = tl.load(row + 6, mask=there, other=0.0)
    step = tl.load(steps + tensor, mask=there, other=0.0) + 1
    first = step == 1  # the first gradient enters undamped, as in torch
    out = factors + 10 * tensor
    tl.store(out, ((1 - 2 * tl.load(row + 5, mask=there, other=0.0)) / tl.load(divisor)).to(tl.float32), mask=there)
    tl.store(out + 1, (1 + 0 * lr).to(tl.float32), mask=there)
    tl.store(out + 2, tl.load(row + 3, mask=there, other=0.0).to(tl.float32), mask=there)
    tl.store(out + 3, tl.where(first, 0.0, momentum).to(tl.float32), mask=there)
    tl.store(out + 4, tl.where(first, 1.0, 1 - dampening).to(tl.float32), mask=there)
    tl.store(out + 5, tl.where(has != 0, nesterov, 1.0).to(tl.float32), mask=there)
    tl.store(out + 6, tl.where(nesterov != 0, momentum, has).to(tl.float32), mask=there)
    tl.store(out + 7, lr.to(tl.float32), mask=there)
    if tl.load(found_inf) == 0:
        tl.store(steps + tensor, step, mask=there)


@triton.jit
def sgd_update(master, grad, buffer, factors):
    """One SGD step on fp32 blocks: the new master and momentum buffer."""
    grad = grad * tl.load(factors) + master * tl.load(factors + 2)
    buffer = buffer * tl.load(factors + 3) + grad * tl.load(factors + 4)
    direction = grad * tl.load(factors + 5) + buffer * tl.load(factors + 6)
    return master - direction * tl.load(factors + 7), buffer


@triton.jit
def lion_factors_kernel(
    hyper,  # float64 (G, 7): lr, beta1, beta2, weight_decay, maximize, and two that are not used
    group_of,  # int32 (T,)
    steps,  # fp32 (T,): steps applied so far, advanced here
    divisor,  # fp32 ()
    found_inf,  # fp32 ()
    factors,  # fp32 (T, 10)
    num_tensors,
    BLOCK: tl.constexpr,
):
    """Factors after the first two: beta1, 1 - beta1, beta2, 1 - beta2, lr."""
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tensor < num_tensors
    row = hyper + 7 * tl.load(group_of + tensor, mask=there, other=0)
    lr = tl.load(row, mask=there, other=0.0)
    beta1 = tl.load(row + 1, mask=there, other=0.0)
    beta2 = tl.load(row + 2, mask=there, other=0.0)
    weight_decay = tl.load(row + 3, mask=there, other=0.0)
    maximize = tl.load(row + 4, mask=there, other=0.0)
    step = tl.load(steps + tensor, mask=there, other=0.0) + 1
    out = factors + 10 * tensor
    tl.store(out, ((1 - 2 * maximize) / tl.load(divisor)).to(tl.float32), mask=there)
    tl.store(out + 1, (1 - lr * weight_decay).to(tl.float32), mask=there)
    tl.store(out + 2, beta1.to(tl.float32), mask=there)
    tl.store(out + 3, (1 - beta1).to(tl.float32), mask=there)
    tl.store(out + 4, beta2.to(tl.float32), mask=there)
    tl.store(out + 5, (1 - beta2).to(tl.float32), mask=there)
    tl.store(out + 6, lr.to(tl.float32), mask=there)
    if tl.load(found_inf) == 0:
        tl.store(steps + tensor, step, mask=there)


@triton.jit
def lion_update(master, grad, exp_avg, factors):
    """One Lion step on fp32 blocks: the new master and moment."""
    grad = grad * tl.load(factors)
    direction = exp_avg * tl.load(factors + 2) + grad * tl.load(factors + 3)
    step = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, direction * 0.0))  # NaN stays NaN
    master = master * tl.load(factors + 1) - step * tl.load(factors + 6)
    return master, exp_avg * tl.load(factors + 4) + grad * tl.load(factors + 5)
