"""Adam in the fused step: a tensor's factors for one step, and the update of one block.

`kernels.adamw` is the readable reference; the arithmetic here is the same, term by term. What is constant for a tensor
is computed once, in float64, in a separate launch: divisions by it become multiplications.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from halfstep.kernels.adamw import AdamColumn
from halfstep.kernels.table import NUM_FACTORS, NUM_SETTINGS

__all__ = ["adamw_factors_kernel", "adamw_update"]

_LR, _BETA1, _BETA2, _EPS, _WEIGHT_DECAY, _DECOUPLED, _MAXIMIZE = (tl.constexpr(int(c)) for c in AdamColumn)
_NUM_SETTINGS, _NUM_FACTORS = tl.constexpr(NUM_SETTINGS), tl.constexpr(NUM_FACTORS)

# Columns of the fp32 table of a tensor's factors:
_OF_GRAD = tl.constexpr(0)  # 1 / divisor, negative to maximize
_OF_MASTER = tl.constexpr(1)  # decoupled weight decay
_L2 = tl.constexpr(2)  # weight decay in the gradient
_KEEP_FIRST = tl.constexpr(3)  # beta1
_ADD_FIRST = tl.constexpr(4)  # 1 - beta1
_KEEP_SECOND = tl.constexpr(5)  # beta2
_ADD_SECOND = tl.constexpr(6)  # 1 - beta2
_ADD_TO_ROOT = tl.constexpr(7)  # eps
_OF_ROOT = tl.constexpr(8)  # 1 / sqrt(1 - beta2^t)
_OF_UPDATE = tl.constexpr(9)  # lr / (1 - beta1^t)


@triton.jit(do_not_specialize=["num_tensors"], do_not_specialize_on_alignment=["divisor", "found_inf"])
def adamw_factors_kernel(
    settings,  # float64 (G, 7): columns of AdamColumn
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
    beta1 = tl.load(row + _BETA1, mask=there, other=0.5)
    beta2 = tl.load(row + _BETA2, mask=there, other=0.5)
    eps = tl.load(row + _EPS, mask=there, other=0.0)
    weight_decay = tl.load(row + _WEIGHT_DECAY, mask=there, other=0.0)
    decoupled = tl.load(row + _DECOUPLED, mask=there, other=0.0)
    maximize = tl.load(row + _MAXIMIZE, mask=there, other=0.0)
    step = tl.load(steps + tensor, mask=there, other=0.0) + 1
    wide = step.to(tl.float64)
    # beta^t by exp and log in float64, and 0^t = 0; 1 - beta^t in fp32 would be off by about 100 ulp.
    power1 = tl.where(beta1 > 0, tl.exp(wide * tl.log(tl.maximum(beta1, 1e-300))), 0.0)
    power2 = tl.where(beta2 > 0, tl.exp(wide * tl.log(tl.maximum(beta2, 1e-300))), 0.0)
    out = factors + tensor * _NUM_FACTORS
    tl.store(out + _OF_GRAD, ((1 - 2 * maximize) / tl.load(divisor)).to(tl.float32), mask=there)
    tl.store(out + _OF_MASTER, (1 - lr * weight_decay * decoupled).to(tl.float32), mask=there)
    tl.store(out + _L2, (weight_decay * (1 - decoupled)).to(tl.float32), mask=there)
    tl.store(out + _KEEP_FIRST, beta1.to(tl.float32), mask=there)
    tl.store(out + _ADD_FIRST, (1 - beta1).to(tl.float32), mask=there)
    tl.store(out + _KEEP_SECOND, beta2.to(tl.float32), mask=there)
    tl.store(out + _ADD_SECOND, (1 - beta2).to(tl.float32), mask=there)
    tl.store(out + _ADD_TO_ROOT, eps.to(tl.float32), mask=there)
    tl.store(out + _OF_ROOT, (1 / tl.sqrt(1 - power2)).to(tl.float32), mask=there)
    tl.store(out + _OF_UPDATE, (lr / (1 - power1)).to(tl.float32), mask=there)
    if tl.load(found_inf) == 0:
        tl.store(steps + tensor, step, mask=there)


if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter has no device libraries

    @triton.jit
    def _divide_fast(a, b):
        """a / b."""
        return a / b

else:
    from triton.language.extra import libdevice

    @triton.jit
    def _divide_fast(a, b):
        """a / b to 2 ulp, in two instructions instead of seven; b at most 2^126."""
        return libdevice.fast_dividef(a, b)


@triton.jit
def adamw_update(master, grad, exp_avg, exp_avg_sq, factors, EXACT: tl.constexpr):
    """One Adam step on fp32 blocks: the new master, the moments, and the root of the second, which 8 bits store.

    Without EXACT the root and the division by it are the hardware's approximations, accurate to 2 ulp of the update: with
    8-bit moments that is far below their rounding, and the kernel is bound by instructions there.
    """
    grad = grad * tl.load(factors + _OF_GRAD) + master * tl.load(factors + _L2)
    master = master * tl.load(factors + _OF_MASTER)
    exp_avg = exp_avg * tl.load(factors + _KEEP_FIRST) + grad * tl.load(factors + _ADD_FIRST)
    exp_avg_sq = exp_avg_sq * tl.load(factors + _KEEP_SECOND) + grad * grad * tl.load(factors + _ADD_SECOND)
    if EXACT:
        root = tl.sqrt_rn(exp_avg_sq)
        update = tl.div_rn(exp_avg, root * tl.load(factors + _OF_ROOT) + tl.load(factors + _ADD_TO_ROOT))
    else:
        root = tl.sqrt(exp_avg_sq)
        update = _divide_fast(exp_avg, root * tl.load(factors + _OF_ROOT) + tl.load(factors + _ADD_TO_ROOT))
    return master - update * tl.load(factors + _OF_UPDATE), exp_avg, exp_avg_sq, root
