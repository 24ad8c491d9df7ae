"""Adam in the fused step: a tensor's factors for this step, and the update of one block.

`kernels.adamw` is the readable reference; the arithmetic here is the same, term by term. What is the same for a whole
tensor is computed once, in float64, in a launch of its own: divisions by it become multiplications.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfstep.kernels.jit_triton import divide_quickly

__all__ = ["adam_factors_kernel", "adam_update"]

# Columns of the float64 table of a group's settings: lr, beta1, beta2, eps, weight_decay, decoupled, maximize.
# Columns of the fp32 table of a tensor's factors, after the first (what the gradient is multiplied with) and the second
# (what the weight is): l2, beta1, 1 - beta1, beta2, 1 - beta2, eps, 1 / sqrt(1 - beta2^t), lr / (1 - beta1^t).


@triton.jit
def adam_factors_kernel(
    hyper,  # float64 (G, 7)
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
    row = hyper + 7 * tl.load(group_of + tensor, mask=there, other=0)
    lr = tl.load(row, mask=there, other=0.0)
    beta1 = tl.load(row + 1, mask=there, other=0.5)
    beta2 = tl.load(row + 2, mask=there, other=0.5)
    eps = tl.load(row + 3, mask=there, other=0.0)
    weight_decay = tl.load(row + 4, mask=there, other=0.0)
    decoupled = tl.load(row + 5, mask=there, other=0.0)
    maximize = tl.load(row + 6, mask=there, other=0.0)
    step = tl.load(steps + tensor, mask=there, other=0.0) + 1
    wide = step.to(tl.float64)
    # beta^t by exp and log in float64, and 0^t = 0; 1 - beta^t in fp32 would be off by about 100 ulp.
    power1 = tl.where(beta1 > 0, tl.exp(wide * tl.log(tl.maximum(beta1, 1e-300))), 0.0)
    power2 = tl.where(beta2 > 0, tl.exp(wide * tl.log(tl.maximum(beta2, 1e-300))), 0.0)
    out = factors + 10 * tensor
    tl.store(out, ((1 - 2 * maximize) / tl.load(divisor)).to(tl.float32), mask=there)
    tl.store(out + 1, (1 - lr * weight_decay * decoupled).to(tl.float32), mask=there)
    tl.store(out + 2, (weight_decay * (1 - decoupled)).to(tl.float32), mask=there)
    tl.store(out + 3, beta1.to(tl.float32), mask=there)
    tl.store(out + 4, (1 - beta1).to(tl.float32), mask=there)
    tl.store(out + 5, beta2.to(tl.float32), mask=there)
    tl.store(out + 6, (1 - beta2).to(tl.float32), mask=there)
    tl.store(out + 7, eps.to(tl.float32), mask=there)
    tl.store(out + 8, (1 / tl.sqrt(1 - power2)).to(tl.float32), mask=there)
    tl.store(out + 9, (lr / (1 - power1)).to(tl.float32), mask=there)
    if tl.load(found_inf) == 0:
        tl.store(steps + tensor, step, mask=there)


@triton.jit
def adam_update(master, grad, exp_avg, exp_avg_sq, factors, EXACT: tl.constexpr):
    """One Adam step on fp32 blocks: the new master, the moments, and the root of the second, which 8 bits store.

    Without EXACT the root and the division by it are the hardware's own, good to 2 ulp of the update: with moments of 8
    bits nobody can tell, and the kernel is bound by instructions there.
    """
    grad = grad * tl.load(factors) + master * tl.load(factors + 2)
    master = master * tl.load(factors + 1)
    exp_avg = exp_avg * tl.load(factors + 3) + grad * tl.load(factors + 4)
    exp_avg_sq = exp_avg_sq * tl.load(factors + 5) + grad * grad * tl.load(factors + 6)
    if EXACT:
        root = tl.sqrt_rn(exp_avg_sq)
        update = tl.div_rn(exp_avg, root * tl.load(factors + 8) + tl.load(factors + 7))
    else:
        root = tl.sqrt(exp_avg_sq)
        update = divide_quickly(exp_avg, root * tl.load(factors + 8) + tl.load(factors + 7))
    return master - update * tl.load(factors + 9), exp_avg, exp_avg_sq, root
