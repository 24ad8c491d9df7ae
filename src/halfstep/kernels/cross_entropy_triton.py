"""Cross-entropy in two launches forward and one backward; `kernels.cross_entropy` is the reference and explains the formulas.

Two forms of each kernel, because what is contiguous differs:

    rows    many contiguous classes (a vocabulary): one program per position runs along its row. Rows of an odd length
            (50257) do not start at a multiple of 16 bytes, and loads from there would be of single elements; so a program
            starts its blocks at the multiple before the row and masks the elements of its neighbour.
    tiles   few classes, or classes far apart ((N, C, H, W)): a program takes a tile of positions x classes, and
            the contiguous one of the two gives the vectors.

The largest logit of a position and its sum of exponentials are updated block by block (online softmax). The sum stays a
vector until the end, so that a block needs one reduction, that of its largest logit. All offsets are 64-bit: the logits of
a batch have more than 2^31 elements. Sums over positions have a fixed order, so results are bit-identical from run to run.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = [
    "reduce_kernel",
    "rows_backward_kernel",
    "rows_forward_kernel",
    "tiles_backward_kernel",
    "tiles_forward_kernel",
]


if os.environ.get("TRITON_INTERPRET") == "1":  # its casts to bf16 truncate

    @triton.jit
    def _round(values, DTYPE: tl.constexpr):
        """fp32 values in DTYPE, rounded to nearest, ties to even."""
        if tl.bfloat16 == DTYPE:
            bits = values.to(tl.int32, bitcast=True)
            bits += tl.where(values == values, 0x7FFF + ((bits >> 16) & 1), 0)
            return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return values.to(DTYPE)

else:

    @triton.jit
    def _round(values, DTYPE: tl.constexpr):
        """fp32 values in DTYPE."""
        return values.to(DTYPE)


@triton.jit
def _finite_or_zero(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _row_offset(position, middle, inner, outer_stride, middle_stride, INNER_STRIDE: tl.constexpr):
    """Where the row of a position starts, in elements."""
    rest = position // inner
    return (rest // middle) * outer_stride + (rest % middle) * middle_stride + (position % inner) * INNER_STRIDE


@triton.jit
def _loss(highest, total, picked, reference, smooth, target_weight, weight_sum, hard, each, SMOOTHS: tl.constexpr):
    """Losses from the largest logits, the sums of exponentials, the targets' logits and sum_c w_c (x_c - reference)."""
    log_sum = tl.log(total)
    loss = target_weight * (log_sum - (picked - highest))
    if SMOOTHS:
        loss = hard * loss + each * (weight_sum * (log_sum + (highest - reference)) - smooth)
    return loss


@triton.jit
def _factors(
    grad, target, inside, weight_at, weight_sum_at, hard, each, C: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHS: tl.constexpr
):  # fmt: skip
    """What the gradient has at the target, and what it has of each probability."""
    at_target = grad
    if WEIGHTED:
        at_target *= tl.load(weight_at + target, mask=inside, other=0.0).to(tl.float32)
    factor = at_target
    if SMOOTHS:
        at_target *= hard
        factor = at_target + grad * each * (tl.load(weight_sum_at) if WEIGHTED else C * 1.0)
    return at_target, factor


@triton.jit
def rows_forward_kernel(
    logits,
    target_at,  # int64 or uint8 (P,)
    weight_at,  # (C,)
    weight_sum_at,  # fp32 ()
    losses,  # fp32 (P,), without PARTIAL
    scratch,  # fp32: largest logits (P,), sums of exponentials (P,), and with PARTIAL the total (), losses and target weights
    num_positions,
    middle,
    inner,
    outer_stride,
    middle_stride,
    ignore_index,
    hard,  # 1 - label smoothing
    each,  # label smoothing / C
    INNER_STRIDE: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,  # elements of 16 bytes
    ALIGNED: tl.constexpr,  # all rows start at a multiple of VECTOR
    WEIGHTED: tl.constexpr,
    SMOOTHS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """The loss of one position, from its row of contiguous logits."""
    position = tl.program_id(0).to(tl.int64)
    row = _row_offset(position, middle, inner, outer_stride, middle_stride, INNER_STRIDE)
    target = tl.load(target_at + position).to(tl.int64)
    # Typed scalars, because the branch assigns them.
    highest = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.full((), 1.0, dtype=tl.float32)
    loss = tl.full((), 0.0, dtype=tl.float32)
    target_weight = tl.full((), 0.0, dtype=tl.float32)
    first: tl.constexpr = 0 if ALIGNED else VECTOR  # start of the first block without a neighbour's elements
    end: tl.constexpr = C if ALIGNED else C + VECTOR - 1
    if target != ignore_index:
        inside = (target >= 0) & (target < C)
        picked = tl.load(logits + row + target, mask=inside, other=float("nan")).to(tl.float32)
        target_weight = tl.full((), 1.0, dtype=tl.float32)
        weight_sum = C * 1.0
        if WEIGHTED:
            target_weight = tl.load(weight_at + target, mask=inside, other=0.0).to(tl.float32)
            if SMOOTHS:
                weight_sum = tl.load(weight_sum_at)
        reference = _finite_or_zero(picked)
        shift = row % VECTOR
        base = logits + tl.multiple_of(row - shift, VECTOR)
        offsets = tl.arange(0, BLOCK)
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        smooth = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, end, BLOCK):
            columns = start + offsets if ALIGNED else start + offsets - shift.to(tl.int32)
            whole = (start >= first) & (start + BLOCK <= C)
            if whole:
                x = tl.load(base + start + offsets).to(tl.float32)
            else:
                x = tl.load(base + start + offsets, mask=(columns >= 0) & (columns < C), other=float("-inf")).to(
                    tl.float32
                )
            new = tl.maximum(highest, tl.max(x, axis=0))
            safe = tl.where(new == float("-inf"), 0.0, new)  # -inf - -inf would be NaN
            sums = sums * tl.exp(highest - safe) + tl.exp(x - safe)
            highest = new
            if SMOOTHS:
                there = (columns >= 0) & (columns < C)
                difference = x - reference
                if WEIGHTED:
                    difference *= tl.load(weight_at + columns, mask=there, other=0.0).to(tl.float32)
                smooth += tl.where(there, difference, 0.0)
        total = tl.sum(sums, axis=0)
        loss = _loss(
            highest, total, picked, reference, tl.sum(smooth, axis=0), target_weight, weight_sum, hard, each, SMOOTHS
        )
    tl.store(scratch + position, highest)
    tl.store(scratch + num_positions + position, total)
    if PARTIAL:
        partial = scratch + num_positions + num_positions + 1
        tl.store(partial + position, loss)
        tl.store(partial + num_positions + position, target_weight)
    else:
        tl.store(losses + position, loss)


@triton.jit
def rows_backward_kernel(
    grad_at,  # fp32: () or (P,)
    logits,
    result,
    target_at,
    weight_at,
    weight_sum_at,
    scratch,
    grad_stride,  # 0 for one gradient of all positions
    num_positions,
    middle,
    inner,
    outer_stride,
    middle_stride,
    result_outer_stride,
    result_middle_stride,
    ignore_index,
    hard,
    each,
    INNER_STRIDE: tl.constexpr,
    RESULT_INNER_STRIDE: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGNED: tl.constexpr,
    SAME: tl.constexpr,  # logits and result have equal strides
    WEIGHTED: tl.constexpr,
    SMOOTHS: tl.constexpr,
    MEAN: tl.constexpr,
):
    """The gradient of one row."""
    position = tl.program_id(0).to(tl.int64)
    row = _row_offset(position, middle, inner, outer_stride, middle_stride, INNER_STRIDE)
    if SAME:
        out_row = row
    else:
        out_row = _row_offset(position, middle, inner, result_outer_stride, result_middle_stride, RESULT_INNER_STRIDE)
    target = tl.load(target_at + position).to(tl.int64)
    shift = out_row % VECTOR
    out = result + tl.multiple_of(out_row - shift, VECTOR)
    if SAME:
        base = logits + tl.multiple_of(row - shift, VECTOR)
    else:
        base = logits + (row - shift)
    offsets = tl.arange(0, BLOCK)
    dtype: tl.constexpr = result.dtype.element_ty
    first: tl.constexpr = 0 if ALIGNED else VECTOR
    end: tl.constexpr = C if ALIGNED else C + VECTOR - 1
    if target == ignore_index:
        zeros = tl.zeros((BLOCK,), dtype=dtype)
        for start in range(0, end, BLOCK):
            columns = start + offsets if ALIGNED else start + offsets - shift.to(tl.int32)
            whole = (start >= first) & (start + BLOCK <= C)
            if whole:
                tl.store(out + start + offsets, zeros)
            else:
                tl.store(out + start + offsets, zeros, mask=(columns >= 0) & (columns < C))
    else:
        inside = (target >= 0) & (target < C)
        grad = tl.load(grad_at + position * grad_stride)
        if MEAN:
            grad = grad / tl.load(scratch + num_positions + num_positions)
        grad = tl.where(inside, grad, float("nan"))
        at_target, factor = _factors(
            grad, target, inside, weight_at, weight_sum_at, hard, each, C=C, WEIGHTED=WEIGHTED, SMOOTHS=SMOOTHS
        )
        highest = tl.load(scratch + position)
        factor = factor / tl.load(scratch + num_positions + position)
        for start in range(0, end, BLOCK):
            columns = start + offsets if ALIGNED else start + offsets - shift.to(tl.int32)
            there = (columns >= 0) & (columns < C)
            whole = (start >= first) & (start + BLOCK <= C)
            if whole:
                x = tl.load(base + start + offsets).to(tl.float32)
            else:
                x = tl.load(base + start + offsets, mask=there, other=0.0).to(tl.float32)
            value = tl.exp(x - highest) * factor - tl.where(columns == target.to(tl.int32), at_target, 0.0)
            if SMOOTHS:
                if WEIGHTED:
                    value -= grad * each * tl.load(weight_at + columns, mask=there, other=0.0).to(tl.float32)
                else:
                    value -= grad * each
            rounded = _round(value, dtype)
            if whole:
                tl.store(out + start + offsets, rounded)
            else:
                tl.store(out + start + offsets, rounded, mask=there)


@triton.jit
def tiles_forward_kernel(
    logits, target_at, weight_at, weight_sum_at, losses, scratch,
    num_positions, middle, inner, outer_stride, middle_stride, class_stride, ignore_index, hard, each,
    INNER_STRIDE: tl.constexpr, C: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr, SMOOTHS: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """The same for a tile of POSITIONS x BLOCK, class by class in blocks."""
    program = tl.program_id(0).to(tl.int64)
    blocks = (inner + POSITIONS - 1) // POSITIONS
    rest = program // blocks
    index = (program % blocks) * POSITIONS + tl.arange(0, POSITIONS)
    there = index < inner
    position = rest * inner + index
    row = logits + (rest // middle) * outer_stride + (rest % middle) * middle_stride + index * INNER_STRIDE
    target = tl.load(target_at + position, mask=there, other=0).to(tl.int64)
    counted = there & (target != ignore_index)
    inside = counted & (target >= 0) & (target < C)
    picked = tl.load(row + target * class_stride, mask=inside, other=float("nan")).to(tl.float32)
    target_weight = tl.where(counted, 1.0, 0.0)
    weight_sum = C * 1.0
    if WEIGHTED:
        target_weight = tl.load(weight_at + target, mask=inside, other=0.0).to(tl.float32)
        if SMOOTHS:
            weight_sum = tl.load(weight_sum_at)
    reference = _finite_or_zero(picked)
    highest = tl.full((POSITIONS,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((POSITIONS, BLOCK), dtype=tl.float32)
    smooth = tl.zeros((POSITIONS, BLOCK), dtype=tl.float32)
    for start in range(0, C, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = there[:, None] & (columns < C)[None, :]
        at = row[:, None] + (columns.to(tl.int64) * class_stride)[None, :]
        x = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
        new = tl.maximum(highest, tl.max(x, axis=1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        sums = sums * tl.exp(highest - safe)[:, None] + tl.exp(x - safe[:, None])
        highest = new
        if SMOOTHS:
            difference = x - reference[:, None]
            if WEIGHTED:
                difference *= tl.load(weight_at + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
            smooth += tl.where(mask, difference, 0.0)
    total = tl.sum(sums, axis=1)
    loss = _loss(
        highest, total, picked, reference, tl.sum(smooth, axis=1), target_weight, weight_sum, hard, each, SMOOTHS
    )
    loss = tl.where(counted, loss, 0.0)
    tl.store(scratch + position, highest, mask=there)
    tl.store(scratch + num_positions + position, total, mask=there)
    if PARTIAL:
        partial = scratch + num_positions + num_positions + 1
        tl.store(partial + program, tl.sum(loss, axis=0))
        tl.store(partial + tl.num_programs(0) + program, tl.sum(target_weight, axis=0))
    else:
        tl.store(losses + position, loss, mask=there)


@triton.jit
def tiles_backward_kernel(
    grad_at, logits, result, target_at, weight_at, weight_sum_at, scratch,
    grad_stride, num_positions, middle, inner, outer_stride, middle_stride, class_stride,
    result_outer_stride, result_middle_stride, result_class_stride, ignore_index, hard, each,
    INNER_STRIDE: tl.constexpr, RESULT_INNER_STRIDE: tl.constexpr, C: tl.constexpr, POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHS: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """The same for a tile."""
    program = tl.program_id(0).to(tl.int64)
    blocks = (inner + POSITIONS - 1) // POSITIONS
    rest = program // blocks
    index = (program % blocks) * POSITIONS + tl.arange(0, POSITIONS)
    there = index < inner
    position = rest * inner + index
    row = logits + (rest // middle) * outer_stride + (rest % middle) * middle_stride + index * INNER_STRIDE
    out = result + (rest // middle) * result_outer_stride + (rest % middle) * result_middle_stride
    out += index * RESULT_INNER_STRIDE
    target = tl.load(target_at + position, mask=there, other=0).to(tl.int64)
    counted = there & (target != ignore_index)
    inside = counted & (target >= 0) & (target < C)
    grad = tl.load(grad_at + position * grad_stride, mask=there, other=0.0)
    if MEAN:
        grad = grad / tl.load(scratch + num_positions + num_positions)
    grad = tl.where(inside, grad, float("nan"))
    at_target, factor = _factors(
        grad, target, inside, weight_at, weight_sum_at, hard, each, C=C, WEIGHTED=WEIGHTED, SMOOTHS=SMOOTHS
    )
    highest = tl.load(scratch + position, mask=there, other=0.0)
    factor = factor / tl.load(scratch + num_positions + position, mask=there, other=1.0)
    for start in range(0, C, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = there[:, None] & (columns < C)[None, :]
        x = tl.load(row[:, None] + (columns.to(tl.int64) * class_stride)[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.exp(x - highest[:, None]) * factor[:, None]
        value -= tl.where(columns[None, :] == target.to(tl.int32)[:, None], at_target[:, None], 0.0)
        if SMOOTHS:
            if WEIGHTED:
                weights = tl.load(weight_at + columns, mask=columns < C, other=0.0).to(tl.float32)
                value -= (grad * each)[:, None] * weights[None, :]
            else:
                value -= (grad * each)[:, None]
        value = tl.where(counted[:, None], value, 0.0)
        at = out[:, None] + (columns.to(tl.int64) * result_class_stride)[None, :]
        tl.store(at, _round(value, result.dtype.element_ty), mask=mask)


@triton.jit
def reduce_kernel(
    scratch,
    loss_at,  # fp32 ()
    num_positions,
    num_programs,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum or mean of all losses, and the total of the target weights; one program, in a fixed order."""
    total_at = scratch + num_positions + num_positions
    partial = total_at + 1
    losses = tl.zeros((BLOCK,), dtype=tl.float32)
    weights = tl.zeros((BLOCK,), dtype=tl.float32)
    at = 0
    while at < num_programs:
        offsets = at + tl.arange(0, BLOCK)
        losses += tl.load(partial + offsets, mask=offsets < num_programs, other=0.0)
        weights += tl.load(partial + num_programs + offsets, mask=offsets < num_programs, other=0.0)
        at += BLOCK
    loss = tl.sum(losses, axis=0)
    total = tl.sum(weights, axis=0)
    tl.store(total_at, total)
    tl.store(loss_at, loss / total if MEAN else loss)
