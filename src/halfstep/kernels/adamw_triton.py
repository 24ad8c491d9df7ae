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

from halfstep.kernels.jit_triton import (
    join_bf16,
    join_fp16,
    lerp,
    load,
    noise,
    round_bf16,
    split_bf16,
    split_fp16,
    store,
)
from halfstep.kernels.table import ChunkTable

__all__ = ["CHUNK", "FACTORS", "HYPER", "AdamLaunch", "prepare_factors"]

# One warp to a block of 256 values: the new scale of 8-bit moments is then a reduction inside a warp. On an H200 with
# ViT-L/16 and bf16 weights the pass takes 1.34 ms with 8-bit moments (1.42 with 512 values and one warp, 1.57 with 512
# and two, 1.87 with 1024 and four) and 1.92 with fp32 moments (2.00 with 1024 and four, 2.91 with 8192 and eight).
CHUNK = 256

# Columns of the float64 table of a group's settings.
HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize")
# Columns of the fp32 table of a tensor's factors in this step.
FACTORS = ("decay", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "one_over_root", "size", "l2", "sign")


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
    tl.store(out + 5, (1 / tl.sqrt(1 - power2)).to(tl.float32), mask=there)
    tl.store(out + 6, (lr / (1 - power1)).to(tl.float32), mask=there)
    tl.store(out + 7, (weight_decay * (1 - decoupled)).to(tl.float32), mask=there)
    tl.store(out + 8, (1 - 2 * maximize).to(tl.float32), mask=there)
    if tl.load(found_inf) == 0:
        tl.store(steps + tensor, step, mask=there)


@triton.jit
def _update(master, grad, exp_avg, exp_avg_sq, factors, divisor, EXACT: tl.constexpr):
    """One Adam step on fp32 blocks; the factors are scalars of this tensor.

    Without EXACT the root and the division by it are the hardware's own, good to 2 ulp of the update: with moments of 8
    bits nobody can tell, and the exact ones made the pass 1.43 ms instead of 1.34 (H200, ViT-L/16).
    """
    # Divisions by what is the same for a whole tensor are multiplications: an exact division costs ten instructions,
    # and with 8-bit moments the kernel is bound by instructions, not by memory.
    grad = grad * tl.div_rn(tl.load(factors + 8), divisor) + master * tl.load(factors + 7)
    master = master * tl.load(factors)
    exp_avg = lerp(exp_avg, grad, tl.load(factors + 1))
    exp_avg_sq = exp_avg_sq * tl.load(factors + 2) + grad * grad * tl.load(factors + 3)
    if EXACT:
        below = tl.sqrt_rn(exp_avg_sq) * tl.load(factors + 5) + tl.load(factors + 4)
        update = tl.div_rn(exp_avg, below)
    else:
        below = tl.sqrt(exp_avg_sq) * tl.load(factors + 5) + tl.load(factors + 4)
        update = exp_avg / below
    return master - update * tl.load(factors + 6), exp_avg, exp_avg_sq


@triton.jit
def _adamw_kernel(
    chunks,  # int32 (C, 2): tensor, number of the chunk in it
    pointers,  # int64 (T, 7): gradient, weight, low or master, exp_avg, exp_avg_sq, and the scales of the two
    numels,  # int64 (T,)
    factors,  # fp32 (T, 9)
    steps,  # fp32 (T,): the number of this step
    divisor_at,  # fp32 ()
    found_inf,  # fp32 ()
    GRAD: tl.constexpr,
    WEIGHT: tl.constexpr,  # 0: fp32, its own master; 1: bf16; 2: fp16
    HOLD: tl.constexpr,  # beside a 16-bit weight, 0: nothing; 1: the 16 bits it lacks; 2: the whole fp32 master
    STATE: tl.constexpr,  # the moments, 0: fp32; 1: bf16; 2: 8-bit codes with a scale per block
    CHUNK: tl.constexpr,
    FULL: tl.constexpr,
):
    if tl.load(found_inf) != 0:
        return
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunks + 2 * program).to(tl.int64)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    left = tl.load(numels + tensor) - start
    row = pointers + 7 * tensor
    # A block of 256 values to a row, so that the scale of a block of 8-bit moments is a reduction along its row.
    rows = tl.arange(0, CHUNK // 256)
    offsets = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
    grad = load(tl.load(row).to(tl.pointer_type(GRAD)) + start, offsets, left, FULL).to(tl.float32)
    if WEIGHT == 0:
        weight_at = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + start
        master = load(weight_at, offsets, left, FULL)
    elif WEIGHT == 1:  # read as bits: rounding to bf16 is integer arithmetic
        weight_at = tl.load(row + 1).to(tl.pointer_type(tl.int16)) + start
    else:
        weight_at = tl.load(row + 1).to(tl.pointer_type(tl.float16)) + start
    if HOLD == 1:
        low_at = tl.load(row + 2).to(tl.pointer_type(tl.int16)) + start
        low = load(low_at, offsets, left, FULL)
        weight = load(weight_at, offsets, left, FULL)
        master = join_bf16(weight, low) if WEIGHT == 1 else join_fp16(weight, low)
    elif HOLD == 2:
        master_at = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + start
        master = load(master_at, offsets, left, FULL)
    elif WEIGHT != 0:
        weight = load(weight_at, offsets, left, FULL)
        master = join_bf16(weight, 0 * weight) if WEIGHT == 1 else weight.to(tl.float32)
    if STATE == 2:
        first_at = tl.load(row + 3).to(tl.pointer_type(tl.int8)) + start
        second_at = tl.load(row + 4).to(tl.pointer_type(tl.uint8)) + start
        scale_at = tl.load(row + 5).to(tl.pointer_type(tl.float32)) + start // 256
        scale_sq_at = tl.load(row + 6).to(tl.pointer_type(tl.float32)) + start // 256
        there = rows * 256 < left
        code = load(first_at, offsets, left, FULL).to(tl.float32)
        exp_avg = code * tl.abs(code) * (tl.load(scale_at + rows, mask=there, other=0.0) / 16129)[:, None]
        code = load(second_at, offsets, left, FULL).to(tl.float32)
        exp_avg_sq = code * code * (tl.load(scale_sq_at + rows, mask=there, other=0.0) / 65025)[:, None]
    elif STATE == 1:
        first_at = tl.load(row + 3).to(tl.pointer_type(tl.int16)) + start
        second_at = tl.load(row + 4).to(tl.pointer_type(tl.int16)) + start
        exp_avg = (load(first_at, offsets, left, FULL).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        exp_avg_sq = (load(second_at, offsets, left, FULL).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        first_at = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + start
        second_at = tl.load(row + 4).to(tl.pointer_type(tl.float32)) + start
        exp_avg = load(first_at, offsets, left, FULL)
        exp_avg_sq = load(second_at, offsets, left, FULL)
    divisor = tl.load(divisor_at)
    master, exp_avg, exp_avg_sq = _update(master, grad, exp_avg, exp_avg_sq, factors + 9 * tensor, divisor, STATE != 2)
    if WEIGHT == 0:
        store(weight_at, offsets, master, left, FULL)
    else:
        if WEIGHT == 1:
            master, weight, low = split_bf16(master)
        else:
            master, weight, low = split_fp16(master)
        store(weight_at, offsets, weight, left, FULL)
        if HOLD == 1:
            store(low_at, offsets, low, left, FULL)
        elif HOLD == 2:
            store(master_at, offsets, master, left, FULL)
    if STATE == 2:
        if not FULL:  # places past the end must not count for the scale of their block
            exp_avg = tl.where(offsets < left, exp_avg, 0.0)
            exp_avg_sq = tl.where(offsets < left, exp_avg_sq, 0.0)
        scale = tl.max(tl.abs(exp_avg), axis=1)
        scale_sq = tl.max(exp_avg_sq, axis=1)
        per_level = (16129 / tl.where(scale > 0, scale, 1.0))[:, None]  # 127^2
        root = tl.sqrt(tl.abs(exp_avg) * per_level)
        # Nearest, ties to even, as torch rounds: adding and taking away 1.5 * 2^23 leaves no fraction.
        nearest = (root + 12582912.0) - 12582912.0
        store(first_at, offsets, tl.where(exp_avg < 0, -nearest, nearest).to(tl.int8), left, FULL)
        per_level = (65025 / tl.where(scale_sq > 0, scale_sq, 1.0))[:, None]  # 255^2
        square = exp_avg_sq * per_level
        below = tl.floor(tl.sqrt(square))
        up = (square - below * below) / (
            2 * below + 1
        )  # the chance that makes the value, not its root, right on average
        chance = noise(start + offsets, tl.load(steps + tensor).to(tl.int32))
        chosen = tl.minimum(tl.where(chance < up, below + 1, below), 255.0)
        codes = tl.where(exp_avg_sq > 0, tl.maximum(chosen, 1.0), 0.0)
        store(second_at, offsets, codes.to(tl.int32).to(tl.uint8), left, FULL)
        tl.store(scale_at + rows, scale, mask=there)
        tl.store(scale_sq_at + rows, scale_sq, mask=there)
    elif STATE == 1:
        store(first_at, offsets, round_bf16(exp_avg), left, FULL)
        store(second_at, offsets, round_bf16(exp_avg_sq), left, FULL)
    else:
        store(first_at, offsets, exp_avg, left, FULL)
        store(second_at, offsets, exp_avg_sq, left, FULL)


_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_WEIGHT = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STATE = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_HOLD = {None: 0, torch.int16: 1, torch.float32: 2}


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
    """One launch: tensors that agree in the dtypes of gradient, weight and moments (int8: 8-bit codes)."""

    chunks: ChunkTable
    grad_dtype: torch.dtype
    weight_dtype: torch.dtype
    held_dtype: torch.dtype | None  # int16: the bits a weight lacks; fp32: its master
    state_dtype: torch.dtype

    def __call__(self, pointers: Tensor, factors: Tensor, steps: Tensor, divisor: Tensor, found_inf: Tensor) -> None:
        """Update every tensor of the launch in place: whole chunks in one grid, the rest in another."""
        chunks = self.chunks
        for rows, count, full in ((chunks.full, chunks.num_full, True), (chunks.rest, chunks.num_rest, False)):
            if count:
                _adamw_kernel[(count,)](
                    rows,
                    pointers,
                    chunks.numels,
                    factors,
                    steps,
                    divisor,
                    found_inf,
                    GRAD=_TL[self.grad_dtype],
                    WEIGHT=_WEIGHT[self.weight_dtype],
                    HOLD=_HOLD[self.held_dtype],
                    STATE=_STATE[self.state_dtype],
                    CHUNK=CHUNK,
                    FULL=full,
                    num_warps=1,
                )
