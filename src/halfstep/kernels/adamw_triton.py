"""Pass 2 of the fused step: Adam for every tensor in one launch, each byte read once and written once.

The kernel folds unscaling and clipping (one division), decay, moments, master and weight into one pass, and does
nothing if the flag is set. What differs between tensors of a launch (step count, learning rate of the group) is read
from small device tables, so the launch can be captured in a CUDA graph and the learning rate may still change.

`kernels.adamw` is the readable reference; the arithmetic here is the same, term by term.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.jit_triton import join_bf16, join_fp16, lerp, split_bf16, split_fp16
from halfstep.kernels.table import CHUNK, ChunkTable

__all__ = ["FACTORS", "HYPER", "AdamLaunch", "prepare_factors"]

# Columns of the float64 table of a group's settings.
HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize")
# Columns of the fp32 table of a tensor's factors in this step.
FACTORS = ("decay", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "root", "size", "l2", "sign")


@triton.jit
def _prepare_kernel(
    hyper,  # float64 (G, 7)
    group_of,  # int32 (T,)
    steps,  # fp32 (T,): steps applied so far, advanced here
    found_inf,  # fp32 ()
    factors,  # fp32 (T, 9)
    num_tensors,
    BLOCK: tl.constexpr,
):
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
    out = factors + 9 * tensor
    tl.store(out, (1 - lr * weight_decay * decoupled).to(tl.float32), mask=there)
    tl.store(out + 1, (1 - beta1).to(tl.float32), mask=there)
    tl.store(out + 2, beta2.to(tl.float32), mask=there)
    tl.store(out + 3, (1 - beta2).to(tl.float32), mask=there)
    tl.store(out + 4, eps.to(tl.float32), mask=there)
    tl.store(out + 5, tl.sqrt(1 - power2).to(tl.float32), mask=there)
    tl.store(out + 6, (lr / (1 - power1)).to(tl.float32), mask=there)
    tl.store(out + 7, (weight_decay * (1 - decoupled)).to(tl.float32), mask=there)
    tl.store(out + 8, (1 - 2 * maximize).to(tl.float32), mask=there)
    if tl.load(found_inf) == 0:
        tl.store(steps + tensor, step, mask=there)


@triton.jit
def _update(master, grad, exp_avg, exp_avg_sq, factors, divisor):
    """One Adam step on fp32 blocks; the factors are scalars of this tensor."""
    grad = tl.div_rn(grad, divisor) * tl.load(factors + 8)
    l2 = tl.load(factors + 7)
    grad = grad + master * l2
    master = master * tl.load(factors)
    exp_avg = lerp(exp_avg, grad, tl.load(factors + 1))
    exp_avg_sq = exp_avg_sq * tl.load(factors + 2) + grad * grad * tl.load(factors + 3)
    below = tl.div_rn(tl.sqrt_rn(exp_avg_sq), tl.load(factors + 5)) + tl.load(factors + 4)
    master = master - tl.div_rn(exp_avg, below) * tl.load(factors + 6)
    return master, exp_avg, exp_avg_sq


@triton.jit
def _adamw_kernel(
    chunks,  # int64 (C, 2): tensor, start
    pointers,  # int64 (T, 6): gradient, weight, low, exp_avg, exp_avg_sq, aligned
    numels,  # int64 (T,)
    factors,  # fp32 (T, 9)
    divisor_at,  # fp32 ()
    found_inf,  # fp32 ()
    GRAD: tl.constexpr,
    WEIGHT: tl.constexpr,  # 0: fp32, its own master; 1: bf16 and low; 2: fp16 and low
    STATE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    if tl.load(found_inf) != 0:
        return
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunks + 2 * program)
    start = tl.load(chunks + 2 * program + 1)
    left = tl.load(numels + tensor) - start
    row = pointers + 6 * tensor
    divisor = tl.load(divisor_at)
    factors += 9 * tensor
    offsets = tl.arange(0, CHUNK)
    grad_at = tl.load(row).to(tl.pointer_type(GRAD)) + start
    exp_avg_at = tl.load(row + 3).to(tl.pointer_type(STATE)) + start
    exp_avg_sq_at = tl.load(row + 4).to(tl.pointer_type(STATE)) + start
    if WEIGHT == 0:
        weight_at = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + start
        low_at = weight_at
    elif WEIGHT == 1:
        weight_at = tl.load(row + 1).to(tl.pointer_type(tl.int16)) + start
        low_at = tl.load(row + 2).to(tl.pointer_type(tl.int16)) + start
    else:
        weight_at = tl.load(row + 1).to(tl.pointer_type(tl.float16)) + start
        low_at = tl.load(row + 2).to(tl.pointer_type(tl.int16)) + start
    if (left >= CHUNK) & (tl.load(row + 5) == 1):
        grad_at = tl.multiple_of(grad_at, 16)
        exp_avg_at = tl.multiple_of(exp_avg_at, 16)
        exp_avg_sq_at = tl.multiple_of(exp_avg_sq_at, 16)
        weight_at = tl.multiple_of(weight_at, 16)
        low_at = tl.multiple_of(low_at, 16)
        grad = tl.load(grad_at + offsets).to(tl.float32)
        exp_avg = tl.load(exp_avg_at + offsets).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sq_at + offsets).to(tl.float32)
        weight = tl.load(weight_at + offsets)
        if WEIGHT == 0:
            master = weight
        elif WEIGHT == 1:
            master = join_bf16(weight, tl.load(low_at + offsets))
        else:
            master = join_fp16(weight, tl.load(low_at + offsets))
        master, exp_avg, exp_avg_sq = _update(master, grad, exp_avg, exp_avg_sq, factors, divisor)
        tl.store(exp_avg_at + offsets, exp_avg)
        tl.store(exp_avg_sq_at + offsets, exp_avg_sq)
        if WEIGHT == 0:
            tl.store(weight_at + offsets, master)
        elif WEIGHT == 1:
            high, low = split_bf16(master)
            tl.store(weight_at + offsets, high)
            tl.store(low_at + offsets, low)
        else:
            high, low = split_fp16(master)
            tl.store(weight_at + offsets, high)
            tl.store(low_at + offsets, low)
    else:
        mask = offsets < left
        grad = tl.load(grad_at + offsets, mask=mask, other=0.0).to(tl.float32)
        exp_avg = tl.load(exp_avg_at + offsets, mask=mask, other=0.0).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sq_at + offsets, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_at + offsets, mask=mask, other=0)
        if WEIGHT == 0:
            master = weight
        elif WEIGHT == 1:
            master = join_bf16(weight, tl.load(low_at + offsets, mask=mask, other=0))
        else:
            master = join_fp16(weight, tl.load(low_at + offsets, mask=mask, other=0))
        master, exp_avg, exp_avg_sq = _update(master, grad, exp_avg, exp_avg_sq, factors, divisor)
        tl.store(exp_avg_at + offsets, exp_avg, mask=mask)
        tl.store(exp_avg_sq_at + offsets, exp_avg_sq, mask=mask)
        if WEIGHT == 0:
            tl.store(weight_at + offsets, master, mask=mask)
        elif WEIGHT == 1:
            high, low = split_bf16(master)
            tl.store(weight_at + offsets, high, mask=mask)
            tl.store(low_at + offsets, low, mask=mask)
        else:
            high, low = split_fp16(master)
            tl.store(weight_at + offsets, high, mask=mask)
            tl.store(low_at + offsets, low, mask=mask)


_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_WEIGHT = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def prepare_factors(hyper: Tensor, group_of: Tensor, steps: Tensor, found_inf: Tensor) -> Tensor:
    """Advance the step counts unless the flag is set, and compute each tensor's factors for this step."""
    count = len(steps)
    factors = torch.empty((count, len(FACTORS)), dtype=torch.float32, device=steps.device)
    _prepare_kernel[(triton.cdiv(count, 128),)](
        hyper, group_of, steps, found_inf, factors, count, BLOCK=128, num_warps=4
    )
    return factors


@dataclass(frozen=True)
class AdamLaunch:
    """One launch: tensors that agree in the dtypes of gradient, weight and moments."""

    chunks: ChunkTable
    grad_dtype: torch.dtype
    weight_dtype: torch.dtype
    state_dtype: torch.dtype

    def __call__(self, pointers: Tensor, factors: Tensor, divisor: Tensor, found_inf: Tensor) -> None:
        """Update every tensor of the launch in place."""
        if self.chunks.num_chunks:
            _adamw_kernel[(self.chunks.num_chunks,)](
                self.chunks.rows,
                pointers,
                self.chunks.numels,
                factors,
                divisor,
                found_inf,
                GRAD=_TL[self.grad_dtype],
                WEIGHT=_WEIGHT[self.weight_dtype],
                STATE=_TL[self.state_dtype],
                CHUNK=CHUNK,
                num_warps=8,
            )
