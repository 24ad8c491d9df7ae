"""Pass 2 of the fused step: every tensor in one launch, each byte read once and written once.

The kernel folds unscaling and clipping, decay, moments, master and weight into one pass, and does nothing if the flag is
set. How weights, masters and moments are stored is here; what an optimizer computes is in `adamw_triton` and
`sgd_triton`. What differs between tensors of a launch (step count, learning rate of the group) is read from small device
tables, so the launch can be captured in a CUDA graph and the learning rate may still change.

Whole chunks of aligned tensors are read in vectors and without masks; the others, tails and odd addresses, in a launch
of their own. Both in one launch took 156 registers a thread instead of 80, and 1.29 ms instead
of 1.19 (8-bit moments, ViT-L/16, H200).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.adamw_triton import adam_factors_kernel, adam_update
from halfstep.kernels.jit_triton import (
    join_bf16,
    join_fp16,
    load,
    noise,
    place,
    round_bf16,
    split_bf16,
    split_fp16,
    store,
)
from halfstep.kernels.sgd_triton import lion_factors_kernel, lion_update, sgd_factors_kernel, sgd_update
from halfstep.kernels.table import ChunkTable

__all__ = ["LeanLaunch", "chunk_of", "prepare_factors"]

NUM_FACTORS = 10  # columns of the fp32 table of a tensor's factors in this step

# rule -> its number in the kernel, and the kernel that prepares its factors
_RULES = {
    "adam": (0, adam_factors_kernel),
    "sgd": (1, sgd_factors_kernel),
    "plain_sgd": (2, sgd_factors_kernel),
    "lion": (3, lion_factors_kernel),
}


@triton.jit
def _places(row, start, WEIGHT: tl.constexpr, HOLD: tl.constexpr, FULL: tl.constexpr):
    """Where the weight's chunk is (a 16-bit one as bits), and what is held beside it."""
    if WEIGHT == 0:
        weight_at = place(row + 1, start, tl.float32, FULL)
    elif WEIGHT == 1:  # rounding to bf16 is integer arithmetic
        weight_at = place(row + 1, start, tl.int16, FULL)
    else:
        weight_at = place(row + 1, start, tl.float16, FULL)
    if HOLD == 1:
        held_at = place(row + 2, start, tl.int16, FULL)
    elif HOLD == 2:
        held_at = place(row + 2, start, tl.float32, FULL)
    else:
        held_at = weight_at
    return weight_at, held_at


@triton.jit
def _read_master(weight_at, held_at, offsets, left, WEIGHT: tl.constexpr, HOLD: tl.constexpr, FULL: tl.constexpr):
    """The fp32 master, from wherever it is held."""
    if WEIGHT == 0 or HOLD == 2:
        master = load(held_at, offsets, left, FULL)
    else:
        weight = load(weight_at, offsets, left, FULL)
        if WEIGHT == 1:
            master = join_bf16(weight, load(held_at, offsets, left, FULL) if HOLD == 1 else 0 * weight)
        elif HOLD == 1:
            master = join_fp16(weight, load(held_at, offsets, left, FULL))
        else:
            master = weight.to(tl.float32)
    return master


@triton.jit
def _write_master(
    weight_at, held_at, offsets, master, left, WEIGHT: tl.constexpr, HOLD: tl.constexpr, FULL: tl.constexpr
):
    """The weight, and what is held beside it."""
    if WEIGHT == 0:
        store(weight_at, offsets, master, left, FULL)
    else:
        if WEIGHT == 1:
            weight, low = split_bf16(master)
        else:
            weight, low = split_fp16(master)
        store(weight_at, offsets, weight, left, FULL)
        if HOLD == 1:
            store(held_at, offsets, low, left, FULL)
        elif HOLD == 2:
            largest = 3.3895313892515355e38 if WEIGHT == 1 else 65504.0
            finite = tl.abs(master) < float("inf")
            master = tl.where(finite, tl.minimum(tl.maximum(master, -largest), largest), master)
            store(held_at, offsets, master, left, FULL)


@triton.jit
def _moment_places(row, scales, start, STATE: tl.constexpr, SIGNED: tl.constexpr, FULL: tl.constexpr):
    """Where a moment's chunk is, and the scales of its blocks."""
    if STATE == 2:
        at = place(row, start, tl.int8 if SIGNED else tl.uint8, FULL)
    elif STATE == 1:
        at = place(row, start, tl.int16, FULL)
    else:
        at = place(row, start, tl.float32, FULL)
    return at, tl.load(scales).to(tl.pointer_type(tl.float32)) + start // 256


@triton.jit
def _read_moment(at, scale_at, offsets, left, STATE: tl.constexpr, SIGNED: tl.constexpr, FULL: tl.constexpr):
    """A moment in fp32: from fp32, from bf16, or from 8-bit codes with a scale per block of 256."""
    stored = load(at, offsets, left, FULL)
    if STATE == 2:
        blocks = tl.arange(0, offsets.shape[0])
        scale = load(scale_at, blocks, (left + 255) // 256, FULL)[:, None]
        code = stored.to(tl.float32)
        if SIGNED:
            moment = code * tl.abs(code) * (scale * (1 / 16129))  # 127^2
        else:
            moment = code * code * (scale * (1 / 65025))  # 255^2
    elif STATE == 1:
        moment = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        moment = stored
    return moment


@triton.jit
def _write_moment(at, scale_at, offsets, moment, left, STATE: tl.constexpr, FULL: tl.constexpr):
    """The counterpart of `_read_moment` for a moment of either sign: codes are rounded to the nearest."""
    if STATE == 2:
        if not FULL:  # places past the end must not count for the scale of their block
            moment = tl.where(offsets < left, moment, 0.0)
        scale = tl.max(tl.abs(moment), axis=1)
        code = tl.sqrt(tl.abs(moment)) * (127 * tl.rsqrt(tl.where(scale > 0, scale, 1.0)))[:, None]
        # Adding 1.5 * 2^23 rounds to the nearest, ties to even, and leaves the integer in the low bits.
        code = (tl.where(moment < 0, -code, code) + 12582912.0).to(tl.int32, bitcast=True)
        store(at, offsets, code.to(tl.int8), left, FULL)
        store(scale_at, tl.arange(0, offsets.shape[0]), scale, (left + 255) // 256, FULL)
    elif STATE == 1:
        store(at, offsets, round_bf16(moment), left, FULL)
    else:
        store(at, offsets, moment, left, FULL)


@triton.jit
def _write_second(at, scale_at, offsets, moment, root, left, seed, STATE: tl.constexpr, FULL: tl.constexpr):
    """The same for a second moment and its root: codes are rounded at random, so that small steps are not lost."""
    if STATE == 2:
        if not FULL:
            moment = tl.where(offsets < left, moment, 0.0)
            root = tl.where(offsets < left, root, 0.0)
        scale = tl.max(moment, axis=1)
        # On the grid of codes; a little below 255 at the most, so that no code is rounded up past it.
        exact = root * (254.9998 * tl.rsqrt(tl.where(scale > 0, scale, 1.0)))[:, None]
        # A second moment above zero gets a code above zero, because the update divides by its root.
        exact = tl.minimum(tl.maximum(exact, 1.0), root * 1e30)
        grid = (exact - 0.5) + 12582912.0  # rounded down, or one less at a whole number, which the chance puts right
        below = grid - 12582912.0
        # The chance that makes the value, not its root, right on average; multiplied out, as a division costs more.
        up = noise(offsets, seed) * (2 * below + 1) < (exact - below) * (exact + below)
        code = grid.to(tl.int32, bitcast=True) + up.to(tl.int32)
        store(at, offsets, code.to(tl.uint8), left, FULL)
        store(scale_at, tl.arange(0, offsets.shape[0]), scale, (left + 255) // 256, FULL)
    else:
        _write_moment(at, scale_at, offsets, moment, left, STATE, FULL)


@triton.jit
def _step_chunk(
    row, factors, seed, start, left,
    RULE: tl.constexpr, GRAD: tl.constexpr, WEIGHT: tl.constexpr, HOLD: tl.constexpr, STATE: tl.constexpr,
    CHUNK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor."""
    # A block of 256 values to a row, so that the scale of a block of 8-bit moments is a reduction along its row.
    offsets = tl.arange(0, CHUNK // 256)[:, None] * 256 + tl.arange(0, 256)[None, :]
    grad = load(place(row, start, GRAD, FULL), offsets, left, FULL).to(tl.float32)
    weight_at, held_at = _places(row, start, WEIGHT, HOLD, FULL)
    master = _read_master(weight_at, held_at, offsets, left, WEIGHT, HOLD, FULL)
    if RULE != 2:
        first_at, scale_at = _moment_places(row + 3, row + 5, start, STATE, True, FULL)
        first = _read_moment(first_at, scale_at, offsets, left, STATE, True, FULL)
    if RULE == 0:
        second_at, scale_sq_at = _moment_places(row + 4, row + 6, start, STATE, False, FULL)
        second = _read_moment(second_at, scale_sq_at, offsets, left, STATE, False, FULL)
        master, first, second, root = adam_update(master, grad, first, second, factors, STATE != 2)
        _write_second(second_at, scale_sq_at, offsets, second, root, left, seed, STATE, FULL)
    elif RULE == 1:
        master, first = sgd_update(master, grad, first, factors)
    elif RULE == 2:
        master, first = sgd_update(master, grad, 0.0 * grad, factors)
    else:
        master, first = lion_update(master, grad, first, factors)
    if RULE != 2:
        _write_moment(first_at, scale_at, offsets, first, left, STATE, FULL)
    _write_master(weight_at, held_at, offsets, master, left, WEIGHT, HOLD, FULL)


@triton.jit
def _lean_kernel(
    chunks,  # int32 (C, 2): tensor, number of the chunk in it
    pointers,  # int64 (T, 7): gradient, weight, low or master, the two moments, and the scales of the two
    numels,  # int64 (T,)
    factors,  # fp32 (T, 10)
    steps,  # fp32 (T,): the number of this step
    found_inf,  # fp32 ()
    RULE: tl.constexpr,
    GRAD: tl.constexpr,
    WEIGHT: tl.constexpr,  # 0: fp32, its own master; 1: bf16; 2: fp16
    HOLD: tl.constexpr,  # beside a 16-bit weight, 0: nothing; 1: the 16 bits it lacks; 2: the whole fp32 master
    STATE: tl.constexpr,  # the moments, 0: fp32; 1: bf16; 2: 8-bit codes with a scale per block
    CHUNK: tl.constexpr,
    FULL: tl.constexpr,
):
    if tl.load(found_inf) != 0:
        return
    # Backwards: the gradients that pass 1 read last are still in the cache.
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    tensor = tl.load(chunks + 2 * program).to(tl.int64)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    row = pointers + 7 * tensor
    # The random numbers of a place and a step are a hash of both: what is the same for the chunk is computed once.
    seed = start.to(tl.uint32) * 0x9E3779B1 + tl.load(steps + tensor).to(tl.uint32) * 0x85EBCA77
    left = CHUNK if FULL else tl.load(numels + tensor) - start
    _step_chunk(row, factors + 10 * tensor, seed, start, left, RULE, GRAD, WEIGHT, HOLD, STATE, CHUNK, FULL)


_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_WEIGHT = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STATE = {None: 0, torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_HOLD = {None: 0, torch.int16: 1, torch.float32: 2}
# Elements and warps of a program, by the moments' dtype. On an H200 with ViT-L/16 and bf16 weights the pass takes 1.19 ms
# with 8-bit moments (1.23 at 256 elements and one warp, 1.26 at 1024 and two) and 1.90 with fp32 ones, as at 512/1 and 1024/2.
_SHAPE: dict[torch.dtype | None, tuple[int, int]] = {
    None: (512, 2),
    torch.float32: (512, 2),
    torch.bfloat16: (512, 2),
    torch.int8: (512, 1),
}


def chunk_of(state_dtype: torch.dtype | None) -> int:
    """Elements in a chunk, for moments of this dtype."""
    return _SHAPE[state_dtype][0]


def prepare_factors(
    rule: str, hyper: Tensor, group_of: Tensor, steps: Tensor, divisor: Tensor, found_inf: Tensor
) -> Tensor:
    """Advance the step counts unless the flag is set, and compute each tensor's factors for this step."""
    count = len(steps)
    factors = torch.empty((count, NUM_FACTORS), dtype=torch.float32, device=steps.device)
    _RULES[rule][1][(triton.cdiv(count, 128),)](
        hyper, group_of, steps, divisor, found_inf, factors, count, BLOCK=128, num_warps=4
    )
    return factors


@dataclass(frozen=True)
class LeanLaunch:
    """One launch: tensors that agree in the dtypes of gradient, weight and moments (int8: 8-bit codes)."""

    rule: str
    chunks: ChunkTable
    grad_dtype: torch.dtype
    weight_dtype: torch.dtype
    held_dtype: torch.dtype | None  # int16: the bits a weight lacks; fp32: its master
    state_dtype: torch.dtype | None

    def __call__(self, pointers: Tensor, factors: Tensor, steps: Tensor, found_inf: Tensor) -> None:
        """Update every tensor of the launch in place."""
        chunk, warps = _SHAPE[self.state_dtype]
        table = self.chunks
        for rows, full in ((table.rows[: table.num_full], True), (table.rows[table.num_full :], False)):
            if len(rows):
                _lean_kernel[(len(rows),)](
                    rows,
                    pointers,
                    table.numels,
                    factors,
                    steps,
                    found_inf,
                    RULE=_RULES[self.rule][0],
                    GRAD=_TL[self.grad_dtype],
                    WEIGHT=_WEIGHT[self.weight_dtype],
                    HOLD=_HOLD[self.held_dtype],
                    STATE=_STATE[self.state_dtype],
                    CHUNK=chunk,
                    FULL=full,
                    num_warps=warps,
                    # A product and a sum stay two roundings, as in the reference: fused they were up to 3 ulp from it.
                    # With 8-bit moments nobody could tell, and the kernel is bound by instructions.
                    enable_fp_fusion=self.state_dtype is torch.int8,
                )
