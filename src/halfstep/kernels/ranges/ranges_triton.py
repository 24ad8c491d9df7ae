"""One launch that reads every tensor of a list once and returns its extremes, as integers in the order of the floats.

A program reads one chunk in 16-byte vectors, one per thread and step, and ends with two atomic maxima: of the largest key, and of
the complement of the smallest. fp16 and bf16 are both integers of 16 bits here and share a launch. Loads beyond the end of a
tensor are moved to its last elements, which changes no extreme, so there are no masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.table import ChunkTable, Extent, to_device
from halfstep.kernels.table_triton import chunk_pointer

__all__ = ["fill"]

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


@triton.jit(do_not_specialize=["num_full"])
def _ranges_kernel(
    chunks,  # int32 (C, 2): tensor index, chunk index within the tensor; full ones first
    tensors,  # int64 (T, _COLUMNS)
    table,  # int32 (rows, 2)
    num_full,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    TILES: tl.constexpr,
    PITCHED: tl.constexpr,
    MAGNITUDE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    about = tensors + tl.load(chunks + 2 * program).to(tl.int64) * _COLUMNS
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    numel, inner, pitch = tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
    row = table + 2 * tl.load(about + 4)
    if PITCHED:
        first_row = start // inner
        begin, end = start - first_row * inner, tl.minimum(numel, start + CHUNK) - first_row * inner
        pointer = chunk_pointer(about, first_row * pitch, DTYPE, True)
        _measure(
            pointer, begin.to(tl.int32), end.to(tl.int32), inner.to(tl.int32), pitch, row, ROWS, VECTOR, False, True, TILES, MAGNITUDE
        )  # fmt: skip
    elif program < num_full:
        pointer = chunk_pointer(about, start, DTYPE, True)
        _measure(pointer, 0, CHUNK, 0, 0, row, ROWS, VECTOR, True, False, TILES, MAGNITUDE)
    else:
        end = tl.minimum(numel - start, CHUNK).to(tl.int32)
        pointer = chunk_pointer(about, start, DTYPE, False)
        _measure(pointer, 0, end, 0, 0, row, ROWS, VECTOR, False, False, TILES, MAGNITUDE)


def fill(table: Tensor, rows: Sequence[int], extents: Sequence[Extent], width: int, *, pitched: bool) -> None:
    """Measure memory with elements of `width` bytes into these rows of the table."""
    about = np.column_stack((np.array(extents, dtype=np.int64), np.array(rows, dtype=np.int64)))
    aligned = (about[:, 0] % 16 == 0).tolist()
    chunks = ChunkTable([extent.numel for extent in extents], aligned, CHUNK, table.device)
    dtype: Any = tl.int32 if width == 4 else tl.int16
    _ranges_kernel[(chunks.num_chunks,)](
        chunks.rows,
        to_device(about, table.device),
        table,
        chunks.num_full,
        DTYPE=dtype,
        CHUNK=CHUNK,
        ROWS=32 * WARPS,
        VECTOR=16 // width,
        TILES=_TILES,
        PITCHED=pitched,
        MAGNITUDE=0x7FFFFFFF if width == 4 else 0x7FFF,
        num_warps=WARPS,
    )
