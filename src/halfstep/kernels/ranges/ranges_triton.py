"""One launch that reads every tensor of a list once and returns its extremes, as integers in the order of the floats.

A program reads one chunk in 16-byte vectors, one per thread and step, and ends with two atomic maxima: of the largest key, and of
the complement of the smallest. fp16 and bf16 are both integers of 16 bits here and share a launch. Loads beyond the end of a
tensor are moved to its last elements, which changes no extreme, so there are no masks.

The lists are short and never the same twice, so the host must do little: the grid is the largest number of chunks by the number of
tensors, programs beyond the end of theirs return at once, and one small table is copied. (A table of chunks cost 0.8 ms of host time
a launch, twice what the measurement takes.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.table_triton import chunk_pointer

__all__ = ["CHUNK", "compile_kernels", "fill"]

CHUNK = 32768  # elements of a program
WARPS = 4
_TILES = 4  # loads of a thread in a step of the loop
_SMALLEST = tl.constexpr(-(1 << 31))
_COLUMNS = tl.constexpr(5)  # of a tensor: pointer, numel, inner, pitch, row of the table


@triton.jit
def _keys(values, MAGNITUDE: tl.constexpr):
    """Integers in the order of the floats whose bits these are."""
    wide = values.to(tl.int32)
    return wide ^ ((wide >> 31) & MAGNITUDE)


@triton.jit
def _measure(
    pointer, begin, end, inner, pitch, row, ROWS: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr,
    PITCHED: tl.constexpr, TILES: tl.constexpr, MAGNITUDE: tl.constexpr,
):  # fmt: skip
    """Measure the elements from number `begin` to `end` of what begins at `pointer`."""
    low = tl.full((ROWS, VECTOR), _SMALLEST, dtype=tl.int32)
    high = tl.full((ROWS, VECTOR), _SMALLEST, dtype=tl.int32)
    vectors = tl.arange(0, ROWS) * VECTOR
    inside = tl.arange(0, VECTOR)[None, :]
    at = tl.full((), 0, dtype=tl.int32) + begin  # a number that the loop can change, also where `begin` is constant
    while at < end:  # not `for`: the interpreter of Triton 3.6 cannot make a range of loaded numbers with numpy 2.4
        for tile in tl.static_range(TILES):
            first = at + tile * ROWS * VECTOR + vectors
            if PITCHED:  # rows are whole vectors, so one division finds the place of a vector
                vector = tl.minimum(first, end - VECTOR) // VECTOR
                place = (vector // (inner // VECTOR)).to(tl.int64) * (pitch // VECTOR) + vector % (inner // VECTOR)
                offsets = place[:, None] * VECTOR + inside
            elif FULL:
                offsets = first[:, None] + inside
            else:
                offsets = tl.minimum(first[:, None] + inside, end - 1)
            keys = _keys(tl.load(pointer + offsets), MAGNITUDE)
            high = tl.maximum(high, keys)
            low = tl.maximum(low, ~keys)
        at += TILES * ROWS * VECTOR
    tl.atomic_max(row, tl.max(tl.max(low, axis=1)), sem="relaxed")
    tl.atomic_max(row + 1, tl.max(tl.max(high, axis=1)), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["tensors", "table"])
def _ranges_kernel(
    tensors,  # int64 (T, _COLUMNS)
    table,  # int32 (rows, 2)
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    TILES: tl.constexpr,
    PITCHED: tl.constexpr,
    MAGNITUDE: tl.constexpr,
):
    about = tensors + tl.program_id(1).to(tl.int64) * _COLUMNS
    start = tl.program_id(0).to(tl.int64) * CHUNK
    numel, inner, pitch = tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
    row = table + 2 * tl.load(about + 4)
    if start < numel:
        if PITCHED:
            first_row = start // inner
            begin, end = start - first_row * inner, tl.minimum(numel, start + CHUNK) - first_row * inner
            pointer = chunk_pointer(about, first_row * pitch, DTYPE, True)
            _measure(
                pointer, begin.to(tl.int32), end.to(tl.int32), inner.to(tl.int32), pitch, row, ROWS, VECTOR, False, True, TILES, MAGNITUDE
            )  # fmt: skip
        elif (start + CHUNK <= numel) & (tl.load(about) % 16 == 0):
            pointer = chunk_pointer(about, start, DTYPE, True)
            _measure(pointer, 0, CHUNK, 0, 0, row, ROWS, VECTOR, True, False, TILES, MAGNITUDE)
        else:
            end = tl.minimum(numel - start, CHUNK).to(tl.int32)
            pointer = chunk_pointer(about, start, DTYPE, False)
            _measure(pointer, 0, end, 0, 0, row, ROWS, VECTOR, False, False, TILES, MAGNITUDE)


def fill(table: Tensor, tensors: Tensor, largest: int, width: int, *, pitched: bool) -> None:
    """Measure memory with elements of `width` bytes: `tensors` has its extents and rows of the table, `largest` most elements."""
    grid = (-(-largest // CHUNK), len(tensors))
    _ranges_kernel[grid](tensors, table, **_constants(width, pitched=pitched))


def compile_kernels() -> None:
    """Compile all variants for the current device, without a launch."""
    for width in (2, 4):
        for pitched in (False, True):
            _ranges_kernel.warmup(torch.int64, torch.int32, **_constants(width, pitched=pitched), grid=(1, 1))


def _constants(width: int, *, pitched: bool) -> dict[str, Any]:
    return {
        "DTYPE": tl.int32 if width == 4 else tl.int16,
        "CHUNK": CHUNK,
        "ROWS": 32 * WARPS,
        "VECTOR": 16 // width,
        "TILES": _TILES,
        "PITCHED": pitched,
        "MAGNITUDE": 0x7FFFFFFF if width == 4 else 0x7FFF,
        "num_warps": WARPS,
    }
