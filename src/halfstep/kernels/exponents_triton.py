"""One launch that reads every tensor of a list once and counts its elements by exponent.

A histogram with one memory operation per element is far slower than reading the elements, and Triton's `tl.histogram` spends 8
ballots and 8 population counts on each. Here the counters are registers: each row of threads has 8 integers, and each integer 4
counters of 8 bits, together a window of 32 powers of two. An element adds 1 << (8 * position) to one of the 8. Because a counter
ends at 255, a program counts a chunk of at most 255 elements per row, then adds the rows up in 16-bit fields and the sums to the
tensor's row of the table.

The window begins at the largest magnitude of the chunk's first tile. 32 powers of two are enough for nearly every chunk of a
real tensor: with normally distributed elements 1 chunk in 5000 leaves it. The extremes of the chunk, which the kernel
has to report anyway, show whether all of it was in the window; what is missing then are the zeros. If it was not, or if there
is an inf, a NaN or a subnormal, the chunk is read again: once for the special values, then once per window from its largest to its
smallest magnitude. So the counts are exact for all bit patterns and the usual chunk is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels import exponents as reference
from halfstep.kernels.table import ChunkTable, PointerTable, to_device
from halfstep.kernels.table_triton import chunk_pointer

__all__ = ["SHAPE", "ExponentCounter", "LaunchShape"]

_VECTOR_BYTES = 16  # of a row of a tile: the widest load of a thread


@dataclass(frozen=True)
class LaunchShape:
    """How the work is divided; `python benchmarks/bench_watch.py --kernel` times several."""

    chunk: int = 32768  # elements of a program
    warps: int = 8
    rows: int = 256  # of 16 bytes in a step of its loop: one for each thread
    unroll: int = 2

    def __post_init__(self) -> None:
        assert self.chunk // self.rows <= 255, "counters of 8 bits"
        assert self.chunk <= 65535, "sums of 16 bits"
        assert self.chunk % (self.rows * 8 * self.unroll) == 0, "whole steps of 16-bit elements"


SHAPE = LaunchShape()

_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_NUM_BINS, _BIN_OF_1, _NUM_COLUMNS = (
    tl.constexpr(n) for n in (reference.NUM_BINS, reference.BIN_OF_1, reference.NUM_COLUMNS)
)
_NAN, _INF, _ZEROS, _LARGEST, _SMALLEST = (
    tl.constexpr(n) for n in (reference.NAN, reference.INF, reference.ZEROS, reference.LARGEST, reference.SMALLEST)
)
_WINDOW = tl.constexpr(32)  # bins: 8 integers of 4 counters
_ABOVE_GUESS = tl.constexpr(3)  # how much larger than the first tile the rest of a chunk may be
_INF_BITS = tl.constexpr(0x7F800000)
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_FRACTION = tl.constexpr(23)
_FRACTION_MASK = tl.constexpr(0x007FFFFF)
_SUBNORMAL_SHIFT = tl.constexpr(149 << 23)


@triton.jit
def _magnitude_bits(values):
    """Bits in fp32 of |values|; integer operations where a conversion might flush subnormals."""
    if values.dtype == tl.bfloat16:
        bits = values.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = values.to(tl.float32).to(tl.int32, bitcast=True)
    return bits & 0x7FFFFFFF


@triton.jit
def _without_subnormals(bits):
    """Bits in which a subnormal has the exponent field, 0 or less, that a wider range would give it; 0 gets -149."""
    fraction = bits.to(tl.float32).to(tl.int32, bitcast=True)  # exact for fractions, and normal
    return tl.where(bits < _SMALLEST_NORMAL, fraction - _SUBNORMAL_SHIFT, bits)


@triton.jit
def _tile(pointer, at, end, ROWS: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr):
    """Magnitude bits of a tile of a chunk; a row is one 16-byte load. Elements beyond the end are 0."""
    offsets = tl.arange(0, ROWS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    if FULL:
        values = tl.load(pointer + at + offsets)
    else:
        values = tl.load(pointer + at + offsets, mask=at + offsets < end, other=0)
    return _magnitude_bits(values)


@triton.jit
def _two(packed):
    """Counters 0 and 2, and 1 and 3 of an integer, each pair in 16-bit fields."""
    return tl.join(packed & 0x00FF00FF, (packed >> 8) & 0x00FF00FF)


@triton.jit
def _flush(c0, c1, c2, c3, c4, c5, c6, c7, base, field_to_bin, row, ROWS: tl.constexpr):
    """Add the counters of a window to the bins and return their sum."""
    # tl.join puts its new axis last, so that the pairs are the integers 4, 2 and 1 apart.
    even = tl.join(tl.join(_two(c0), _two(c4)), tl.join(_two(c2), _two(c6)))
    odd = tl.join(tl.join(_two(c1), _two(c5)), tl.join(_two(c3), _two(c7)))
    fields = tl.sum(tl.reshape(tl.join(even, odd), (ROWS, 16)), axis=0)
    # position: parity of the counter, then the integer's number
    position = tl.arange(0, 16)
    first_bin = base + field_to_bin + 4 * (position % 8) + position // 8
    total = 0
    for half in tl.static_range(2):
        counts = (fields >> (16 * half)) & 0xFFFF
        bins = tl.minimum(tl.maximum(first_bin + 2 * half, 0), _NUM_BINS - 1)
        tl.atomic_add(row + bins, counts.to(tl.int64), mask=counts > 0, sem="relaxed")
        total += tl.sum(counts)
    return total


@triton.jit
def _count_tile(bits, start, c0, c1, c2, c3, c4, c5, c6, c7):
    """Add a tile to the counters of the window that begins at `start`, an exponent field and the divisor's fraction."""
    distance = bits - start
    word = distance >> (_FRACTION + 2)
    increment = 1 << ((distance >> (_FRACTION - 3)) & 24)
    c0 += tl.sum(tl.where(word == 0, increment, 0), axis=1)
    c1 += tl.sum(tl.where(word == 1, increment, 0), axis=1)
    c2 += tl.sum(tl.where(word == 2, increment, 0), axis=1)
    c3 += tl.sum(tl.where(word == 3, increment, 0), axis=1)
    c4 += tl.sum(tl.where(word == 4, increment, 0), axis=1)
    c5 += tl.sum(tl.where(word == 5, increment, 0), axis=1)
    c6 += tl.sum(tl.where(word == 6, increment, 0), axis=1)
    c7 += tl.sum(tl.where(word == 7, increment, 0), axis=1)
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def _count_again(pointer, end, row, field_to_bin, fraction, ROWS: tl.constexpr, VECTOR: tl.constexpr):
    """A chunk of any bit patterns: special values first, then windows from its largest to its smallest magnitude."""
    nans = tl.zeros((ROWS,), dtype=tl.int32)
    infs = tl.zeros((ROWS,), dtype=tl.int32)
    zeros = tl.zeros((ROWS,), dtype=tl.int32)
    large = tl.zeros((ROWS,), dtype=tl.int32)
    small = tl.zeros((ROWS,), dtype=tl.uint32)
    at = 0
    while at < end:  # not `for`: see gradstats_triton
        bits = _tile(pointer, at, end, ROWS, VECTOR, False)
        nans += tl.sum((bits > _INF_BITS).to(tl.int32), axis=1)
        infs += tl.sum((bits == _INF_BITS).to(tl.int32), axis=1)
        zeros += tl.sum((bits == 0).to(tl.int32), axis=1)
        finite = tl.where(bits < _INF_BITS, bits, 0)
        large = tl.maximum(large, tl.max(finite, axis=1))
        small = tl.maximum(small, tl.max((0 - finite).to(tl.uint32, bitcast=True), axis=1))
        at += ROWS * VECTOR
    padding = at - end
    tl.atomic_add(row + _NAN, tl.sum(nans).to(tl.int64), sem="relaxed")
    tl.atomic_add(row + _INF, tl.sum(infs).to(tl.int64), sem="relaxed")
    tl.atomic_add(row + _ZEROS, (tl.sum(zeros) - padding).to(tl.int64), sem="relaxed")
    largest = tl.max(large)
    complement = tl.max(small)
    tl.atomic_max(row + _LARGEST, largest.to(tl.int64), sem="relaxed")
    tl.atomic_max(row + _SMALLEST, complement.to(tl.int64), sem="relaxed")
    smallest = (0 - complement).to(tl.int32, bitcast=True)
    top = (_without_subnormals(largest) - fraction) >> _FRACTION
    bottom = (_without_subnormals(smallest) - fraction) >> _FRACTION
    while (largest > 0) & (top >= bottom):
        base = top - (_WINDOW - 1)
        c0 = tl.zeros((ROWS,), dtype=tl.int32)
        c1 = tl.zeros((ROWS,), dtype=tl.int32)
        c2 = tl.zeros((ROWS,), dtype=tl.int32)
        c3 = tl.zeros((ROWS,), dtype=tl.int32)
        c4 = tl.zeros((ROWS,), dtype=tl.int32)
        c5 = tl.zeros((ROWS,), dtype=tl.int32)
        c6 = tl.zeros((ROWS,), dtype=tl.int32)
        c7 = tl.zeros((ROWS,), dtype=tl.int32)
        at = 0
        while at < end:
            bits = _tile(pointer, at, end, ROWS, VECTOR, False)
            bits = _without_subnormals(tl.where(bits < _INF_BITS, bits, 0))
            c0, c1, c2, c3, c4, c5, c6, c7 = _count_tile(
                bits, (base << _FRACTION) + fraction, c0, c1, c2, c3, c4, c5, c6, c7
            )
            at += ROWS * VECTOR
        _flush(c0, c1, c2, c3, c4, c5, c6, c7, base, field_to_bin, row, ROWS)
        top = base - 1


@triton.jit
def _count_chunk(
    pointer,
    end,
    row,
    field_to_bin,
    fraction,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
    FULL: tl.constexpr,
):
    """The usual chunk: one window and one read."""
    guess = tl.max(tl.max(_tile(pointer, 0, end, ROWS, VECTOR, FULL), axis=1))
    base = ((guess - fraction) >> _FRACTION) + _ABOVE_GUESS - (_WINDOW - 1)
    base = tl.minimum(tl.maximum(base, 1), 255 - _WINDOW)  # numbers only: no subnormals, inf or NaN
    start = (base << _FRACTION) + fraction
    c0 = tl.zeros((ROWS,), dtype=tl.int32)
    c1 = tl.zeros((ROWS,), dtype=tl.int32)
    c2 = tl.zeros((ROWS,), dtype=tl.int32)
    c3 = tl.zeros((ROWS,), dtype=tl.int32)
    c4 = tl.zeros((ROWS,), dtype=tl.int32)
    c5 = tl.zeros((ROWS,), dtype=tl.int32)
    c6 = tl.zeros((ROWS,), dtype=tl.int32)
    c7 = tl.zeros((ROWS,), dtype=tl.int32)
    large = tl.zeros((ROWS,), dtype=tl.int32)
    small = tl.zeros((ROWS,), dtype=tl.uint32)
    if FULL:
        for step in tl.range(0, CHUNK // (ROWS * VECTOR), loop_unroll_factor=UNROLL):
            bits = _tile(pointer, step * (ROWS * VECTOR), end, ROWS, VECTOR, True)
            large = tl.maximum(large, tl.max(bits, axis=1))
            small = tl.maximum(small, tl.max((0 - bits).to(tl.uint32, bitcast=True), axis=1))
            c0, c1, c2, c3, c4, c5, c6, c7 = _count_tile(bits, start, c0, c1, c2, c3, c4, c5, c6, c7)
    else:
        at = 0
        while at < end:
            bits = _tile(pointer, at, end, ROWS, VECTOR, False)
            large = tl.maximum(large, tl.max(bits, axis=1))
            small = tl.maximum(small, tl.max((0 - bits).to(tl.uint32, bitcast=True), axis=1))
            c0, c1, c2, c3, c4, c5, c6, c7 = _count_tile(bits, start, c0, c1, c2, c3, c4, c5, c6, c7)
            at += ROWS * VECTOR
    largest = tl.max(large)
    complement = tl.max(small)  # 2^32 less the smallest magnitude; 0 if all are 0
    smallest = (0 - complement).to(tl.int32, bitcast=True)
    inside = (largest < _INF_BITS) & (largest < start + _WINDOW * _SMALLEST_NORMAL) & (smallest >= start)
    if inside | (largest == 0):
        total = _flush(c0, c1, c2, c3, c4, c5, c6, c7, base, field_to_bin, row, ROWS)
        tl.atomic_add(row + _ZEROS, (end - total).to(tl.int64), sem="relaxed")
        tl.atomic_max(row + _LARGEST, largest.to(tl.int64), sem="relaxed")
        tl.atomic_max(row + _SMALLEST, complement.to(tl.int64), sem="relaxed")
    else:
        _count_again(pointer, end, row, field_to_bin, fraction, ROWS, VECTOR)


@triton.jit(do_not_specialize=["num_full"], do_not_specialize_on_alignment=["divisor_at"])
def _exponents_kernel(
    chunks,  # int32 (C, 2): tensor index, chunk index within the tensor; full ones first
    pointers,  # int64 (T, 1)
    numels,  # int64 (T,)
    rows,  # int32 (T,): of the table
    table,  # int64 (rows, _NUM_COLUMNS)
    divisor_at,  # fp32 (), not negative
    num_full,
    DIVIDES: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunks + 2 * program).to(tl.int64)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    row = table + tl.load(rows + tensor).to(tl.int64) * _NUM_COLUMNS
    field_to_bin = _BIN_OF_1 - 127
    fraction = 0
    if DIVIDES:
        bits = tl.load(divisor_at).to(tl.int32, bitcast=True)
        bits = _without_subnormals(tl.where((bits > 0) & (bits < _INF_BITS), bits, 127 << 23))
        field_to_bin = _BIN_OF_1 - (bits >> _FRACTION)
        fraction = bits & _FRACTION_MASK
    if program < num_full:
        pointer = chunk_pointer(pointers + tensor, start, DTYPE, True)
        _count_chunk(pointer, CHUNK, row, field_to_bin, fraction, CHUNK, ROWS, VECTOR, UNROLL, True)
    else:
        end = tl.minimum(tl.load(numels + tensor) - start, CHUNK).to(tl.int32)
        pointer = chunk_pointer(pointers + tensor, start, DTYPE, False)
        _count_chunk(pointer, end, row, field_to_bin, fraction, CHUNK, ROWS, VECTOR, UNROLL, False)


class ExponentCounter:
    """Counts lists of packed tensors of one dtype on one device; reuses its tables from call to call."""

    def __init__(self, shape: LaunchShape = SHAPE) -> None:
        self.shape = shape
        self._pointers = PointerTable()
        self._chunks: ChunkTable | None = None
        self._rows: tuple[list[int], Tensor] | None = None

    def add(self, values: Sequence[Tensor], rows: Sequence[int], divisor: Tensor | None, table: Tensor) -> None:
        """Add each tensor to its row of the table."""
        shape, device, dtype = self.shape, table.device, values[0].dtype
        pointers = self._pointers.refresh(values)
        key = (tuple(v.numel() for v in values), self._pointers.aligned())
        if self._chunks is None or self._chunks.key != key:
            self._chunks = ChunkTable(*key, shape.chunk, device)
        if self._rows is None or self._rows[0] != list(rows):
            self._rows = list(rows), to_device(np.asarray(rows, dtype=np.int32), device)
        _exponents_kernel[(self._chunks.num_chunks,)](
            self._chunks.rows,
            pointers,
            self._chunks.numels,
            self._rows[1],
            table,
            table if divisor is None else divisor,
            self._chunks.num_full,
            DIVIDES=divisor is not None,
            DTYPE=_TL[dtype],
            CHUNK=shape.chunk,
            ROWS=shape.rows,
            VECTOR=_VECTOR_BYTES // dtype.itemsize,
            UNROLL=shape.unroll,
            num_warps=shape.warps,
        )
