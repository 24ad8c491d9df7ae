"""One launch that reads every tensor of a list once and counts its elements by exponent.

A GPU reads elements far faster than it can do one memory operation, or the 8 ballots and 8 population counts of `tl.histogram`, for
each of them. So an element becomes a 32-bit integer with one bit set, at the position (from 1) of its exponent in a window of 31 powers
of two, and these integers are added in carry-save form: bit k of "ones", "twos", "fours" and so on are the binary digits of counter k,
and a full adder (two logic instructions for all 32 counters) adds three integers of one weight to one of the same and one of
twice the weight. That is the positional population count of Harley and Seal, two instructions per element. At the end of its
chunk a program unpacks the digits, sums over its threads in 16-bit fields and adds the sums to the tensor's row of the table.

The window begins a little above the largest magnitude of the chunk's first elements. 31 powers of two are enough for nearly every
chunk of a real tensor: with normally distributed elements 1 chunk in 2500 leaves it. The extremes of the chunk, which are reported
anyway, show whether all of it was in the window or 0; position 0 collects what is below. If it was not, or if there is an inf, a
NaN or a subnormal, the chunk is read again: once for the special values, then once per window from its largest to its smallest
magnitude. So the counts are exact for all bit patterns, and the usual chunk is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels import table as columns
from halfstep.kernels.table import ChunkTable, PointerTable, to_device
from halfstep.kernels.table_triton import chunk_pointer

__all__ = ["SHAPE", "ExponentCounter", "LaunchShape"]

_VECTOR_BYTES = 16  # of a row of a tile, the widest load of a thread: 8 elements of 16 bits, 4 of 32
_TILES = 4  # loads of a thread in a step of the loop; the adders below are written for 4


@dataclass(frozen=True)
class LaunchShape:
    """How the work is divided; `python benchmarks/bench_watch.py --kernel` times several."""

    chunk: int = 32768  # elements of a program
    warps: int = 2

    def __post_init__(self) -> None:
        assert self.chunk < 1 << 16, "sums of 16 bits"
        assert self.chunk // self.rows < 1 << 11, "11 digits"
        assert self.chunk % (self.rows * 8 * _TILES) == 0, "whole steps of 16-bit elements"

    @property
    def rows(self) -> int:
        """Threads, each of which loads and counts one row of a tile."""
        return 32 * self.warps


SHAPE = LaunchShape()

_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_NUM_BINS, _BIN_OF_1, _NUM_COLUMNS = (
    tl.constexpr(n) for n in (columns.NUM_BINS, columns.BIN_OF_1, columns.NUM_COLUMNS)
)
_NAN, _INF, _ZEROS, _LARGEST, _SMALLEST = (
    tl.constexpr(n) for n in (columns.NAN, columns.INF, columns.ZEROS, columns.LARGEST, columns.SMALLEST)
)
_WINDOW = tl.constexpr(31)  # powers of two
_ABOVE_GUESS = tl.constexpr(3)  # how many of them are above the chunk's first elements
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
def _add3(a, b, c):
    """Sum and carry of three integers, bit by bit."""
    either = a ^ b
    return either ^ c, (a & b) | (either & c)


@triton.jit
def _add_tile(distance, ones, twos, fours, ROWS: tl.constexpr, VECTOR: tl.constexpr):
    """Add a tile, as distances, to the lowest digits; also returns the carry, of weight VECTOR.

    A row has VECTOR / 2 integers of weight 1, half as many of weight 2 and so on, all in one thread.
    """
    marks = 1 << (distance >> _FRACTION)
    a, b = tl.split(tl.reshape(marks, (ROWS, VECTOR // 2, 2)))
    ones, carry = _add3(ones, a, b)
    if VECTOR == 8:
        a, b = tl.split(tl.reshape(carry, (ROWS, 2, 2)))
        twos, carry = _add3(twos, a, b)
        a, b = tl.split(carry)
        fours, carry = _add3(fours, a, b)
    else:
        a, b = tl.split(carry)
        twos, carry = _add3(twos, a, b)
    return ones, twos, fours, carry


@triton.jit
def _add_carries(a, b, c, d, e0, e1, e2, e3, e4, e5, e6, e7, e8):
    """Add the carries of four tiles to the higher digits."""
    e0, low = _add3(e0, a, b)
    e0, high = _add3(e0, c, d)
    e1, carry = _add3(e1, low, high)
    e2, carry = e2 ^ carry, e2 & carry
    e3, carry = e3 ^ carry, e3 & carry
    e4, carry = e4 ^ carry, e4 & carry
    e5, carry = e5 ^ carry, e5 & carry
    e6, carry = e6 ^ carry, e6 & carry
    e7, carry = e7 ^ carry, e7 & carry
    e8 = e8 ^ carry
    return e0, e1, e2, e3, e4, e5, e6, e7, e8


@triton.jit
def _fields(digits):
    """Bits k and k + 16 of each row's integer in the 16-bit fields of column k."""
    return (digits[:, None] >> tl.arange(0, 16)[None, :]) & 0x00010001


@triton.jit
def _flush(
    ones, twos, fours, e0, e1, e2, e3, e4, e5, e6, e7, e8, first_bin, row, ROWS: tl.constexpr, VECTOR: tl.constexpr
):
    """Add the counters of a window to the bins and return their sum."""
    a, b = tl.split(tl.reshape(ones, (ROWS, VECTOR // 4, 2)))
    ones, pair = a ^ b, a & b  # pair: further integers of weight 2
    if VECTOR == 8:
        a, b = tl.split(ones)
        c, d = tl.split(twos)
        e, f = tl.split(pair)
        first = _fields(a) + _fields(b)
        second = _fields(c) + _fields(d) + _fields(e) + _fields(f)
        sums = first + 2 * second + 4 * _fields(fours)
    else:
        sums = _fields(tl.reshape(ones, (ROWS,))) + 2 * (_fields(twos) + _fields(tl.reshape(pair, (ROWS,))))
    high = 2 * _fields(e8) + _fields(e7)
    high = 2 * high + _fields(e6)
    high = 2 * high + _fields(e5)
    high = 2 * high + _fields(e4)
    high = 2 * high + _fields(e3)
    high = 2 * high + _fields(e2)
    high = 2 * high + _fields(e1)
    high = 2 * high + _fields(e0)
    fields = tl.sum(sums + VECTOR * high, axis=0)
    column = tl.arange(0, 16)
    total = 0
    for half in tl.static_range(2):
        counts = (fields >> (16 * half)) & 0xFFFF
        inside = column + 16 * half > 0
        bins = tl.minimum(tl.maximum(first_bin + column + 16 * half - 1, 0), _NUM_BINS - 1)
        tl.atomic_add(row + bins, counts.to(tl.int64), mask=inside & (counts > 0), sem="relaxed")
        total += tl.sum(tl.where(inside, counts, 0))
    return total


@triton.jit
def _distance(bits, start, AGAIN: tl.constexpr):
    """How far an element is above the power of two below the window, in units of 2^-23 powers; 0 if it is not in the window.

    Without AGAIN elements above the window are not recognised: the caller finds them by the largest element.
    """
    if AGAIN:
        bits = _without_subnormals(tl.where(bits < _INF_BITS, bits, 0))
        inside = (bits >= start) & (bits < start + _WINDOW * _SMALLEST_NORMAL)
        distance = tl.where(inside, bits - (start - _SMALLEST_NORMAL), 0)
    else:
        distance = tl.maximum(bits - (start - _SMALLEST_NORMAL), 0)
    return distance


@triton.jit
def _count_window(
    pointer, end, start, ROWS: tl.constexpr, VECTOR: tl.constexpr, FULL: tl.constexpr, AGAIN: tl.constexpr
):
    """Counters of the window that begins at `start`, an exponent field and the divisor's fraction; and the extremes."""
    fours = tl.zeros((ROWS,), dtype=tl.int32)
    twos = tl.zeros((ROWS, 2), dtype=tl.int32) if VECTOR == 8 else fours
    ones = tl.zeros((ROWS, VECTOR // 2), dtype=tl.int32)
    e0, e1, e2, e3, e4, e5, e6, e7, e8 = fours, fours, fours, fours, fours, fours, fours, fours, fours
    large = fours  # the largest magnitude
    small = tl.zeros((ROWS,), dtype=tl.uint32)  # 2^32 less the smallest one, 0 without any
    tile: tl.constexpr = ROWS * VECTOR
    at = 0
    while at < end:  # not `for`: the interpreter of Triton 3.6 cannot make a range of loaded numbers with numpy 2.4
        tile0 = _tile(pointer, at, end, ROWS, VECTOR, FULL)
        tile1 = _tile(pointer, at + tile, end, ROWS, VECTOR, FULL)
        tile2 = _tile(pointer, at + 2 * tile, end, ROWS, VECTOR, FULL)
        tile3 = _tile(pointer, at + 3 * tile, end, ROWS, VECTOR, FULL)
        if not AGAIN:
            tops = tl.maximum(tl.maximum(tile0, tile1), tl.maximum(tile2, tile3))
            large = tl.maximum(large, tl.max(tops, axis=1))
            low01 = tl.maximum((0 - tile0).to(tl.uint32, bitcast=True), (0 - tile1).to(tl.uint32, bitcast=True))
            low23 = tl.maximum((0 - tile2).to(tl.uint32, bitcast=True), (0 - tile3).to(tl.uint32, bitcast=True))
            small = tl.maximum(small, tl.max(tl.maximum(low01, low23), axis=1))
        ones, twos, fours, a = _add_tile(_distance(tile0, start, AGAIN), ones, twos, fours, ROWS, VECTOR)
        ones, twos, fours, b = _add_tile(_distance(tile1, start, AGAIN), ones, twos, fours, ROWS, VECTOR)
        ones, twos, fours, c = _add_tile(_distance(tile2, start, AGAIN), ones, twos, fours, ROWS, VECTOR)
        ones, twos, fours, d = _add_tile(_distance(tile3, start, AGAIN), ones, twos, fours, ROWS, VECTOR)
        e0, e1, e2, e3, e4, e5, e6, e7, e8 = _add_carries(a, b, c, d, e0, e1, e2, e3, e4, e5, e6, e7, e8)
        at += 4 * tile
    return ones, twos, fours, e0, e1, e2, e3, e4, e5, e6, e7, e8, tl.max(large), tl.max(small)


@triton.jit
def _count_again(pointer, end, row, field_to_bin, fraction, ROWS: tl.constexpr, VECTOR: tl.constexpr):
    """A chunk of any bit patterns: special values first, then windows from its largest to its smallest magnitude."""
    nans = tl.zeros((ROWS,), dtype=tl.int32)
    infs = tl.zeros((ROWS,), dtype=tl.int32)
    zeros = tl.zeros((ROWS,), dtype=tl.int32)
    large = tl.zeros((ROWS,), dtype=tl.int32)
    small = tl.zeros((ROWS,), dtype=tl.uint32)
    at = 0
    while at < end:
        bits = _tile(pointer, at, end, ROWS, VECTOR, False)
        nans += tl.sum((bits > _INF_BITS).to(tl.int32), axis=1)
        infs += tl.sum((bits == _INF_BITS).to(tl.int32), axis=1)
        zeros += tl.sum((bits == 0).to(tl.int32), axis=1)
        finite = tl.where(bits < _INF_BITS, bits, 0)
        large = tl.maximum(large, tl.max(finite, axis=1))
        small = tl.maximum(small, tl.max((0 - finite).to(tl.uint32, bitcast=True), axis=1))
        at += ROWS * VECTOR
    tl.atomic_add(row + _NAN, tl.sum(nans).to(tl.int64), sem="relaxed")
    tl.atomic_add(row + _INF, tl.sum(infs).to(tl.int64), sem="relaxed")
    tl.atomic_add(row + _ZEROS, (tl.sum(zeros) - (at - end)).to(tl.int64), sem="relaxed")  # at - end: padding
    largest = tl.max(large)
    complement = tl.max(small)
    tl.atomic_max(row + _LARGEST, largest.to(tl.int64), sem="relaxed")
    tl.atomic_max(row + _SMALLEST, complement.to(tl.int64), sem="relaxed")
    smallest = (0 - complement).to(tl.int32, bitcast=True)
    top = (_without_subnormals(largest) - fraction) >> _FRACTION
    bottom = (_without_subnormals(smallest) - fraction) >> _FRACTION
    while (largest > 0) & (top >= bottom):
        base = top - (_WINDOW - 1)
        ones, twos, fours, e0, e1, e2, e3, e4, e5, e6, e7, e8, _large, _small = _count_window(
            pointer, end, (base << _FRACTION) + fraction, ROWS, VECTOR, False, True
        )
        _flush(ones, twos, fours, e0, e1, e2, e3, e4, e5, e6, e7, e8, base + field_to_bin, row, ROWS, VECTOR)
        top = base - 1


@triton.jit
def _count_chunk(
    pointer,
    end,
    row,
    field_to_bin,
    fraction,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    FULL: tl.constexpr,
):
    """The usual chunk: one window and one read."""
    guess = tl.max(tl.max(_tile(pointer, 0, end, ROWS, VECTOR, FULL), axis=1))
    base = ((guess - fraction) >> _FRACTION) + _ABOVE_GUESS - (_WINDOW - 1)
    base = tl.minimum(tl.maximum(base, 1), 255 - _WINDOW)  # numbers only: no subnormals, inf or NaN
    start = (base << _FRACTION) + fraction
    ones, twos, fours, e0, e1, e2, e3, e4, e5, e6, e7, e8, largest, complement = _count_window(
        pointer, end, start, ROWS, VECTOR, FULL, False
    )
    smallest = (0 - complement).to(tl.int32, bitcast=True)
    inside = (largest < _INF_BITS) & (largest < start + _WINDOW * _SMALLEST_NORMAL) & (smallest >= start)
    if inside | (largest == 0):
        total = _flush(ones, twos, fours, e0, e1, e2, e3, e4, e5, e6, e7, e8, base + field_to_bin, row, ROWS, VECTOR)
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
    divisor_at,  # fp32 ()
    num_full,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunks + 2 * program).to(tl.int64)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    row = table + tl.load(rows + tensor).to(tl.int64) * _NUM_COLUMNS
    bits = tl.load(divisor_at).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = _without_subnormals(tl.where((bits > 0) & (bits < _INF_BITS), bits, 127 << 23))
    field_to_bin = _BIN_OF_1 - (bits >> _FRACTION)
    fraction = bits & _FRACTION_MASK
    if program < num_full:
        pointer = chunk_pointer(pointers + tensor, start, DTYPE, True)
        _count_chunk(pointer, CHUNK, row, field_to_bin, fraction, ROWS, VECTOR, True)
    else:
        end = tl.minimum(tl.load(numels + tensor) - start, CHUNK).to(tl.int32)
        pointer = chunk_pointer(pointers + tensor, start, DTYPE, False)
        _count_chunk(pointer, end, row, field_to_bin, fraction, ROWS, VECTOR, False)


class ExponentCounter:
    """Counts lists of packed tensors of one dtype on one device; reuses its tables from call to call."""

    def __init__(self, shape: LaunchShape | None = None) -> None:
        self.shape = shape or SHAPE
        self._pointers = PointerTable()
        self._chunks: ChunkTable | None = None
        self._rows: tuple[list[int], Tensor] | None = None
        self._one: Tensor | None = None

    def add(self, values: Sequence[Tensor], rows: Sequence[int], divisor: Tensor | None, table: Tensor) -> None:
        """Add each tensor to its row of the table."""
        shape, device, dtype = self.shape, table.device, values[0].dtype
        pointers = self._pointers.refresh(values)
        key = (tuple(v.numel() for v in values), self._pointers.aligned())
        if self._chunks is None or self._chunks.key != key:
            self._chunks = ChunkTable(*key, shape.chunk, device)
        if self._rows is None or self._rows[0] != list(rows):
            self._rows = list(rows), to_device(np.asarray(rows, dtype=np.int32), device)
        if not self._chunks.num_chunks:
            return
        if divisor is None and self._one is None:  # not a variant of the kernel, which takes seconds to compile
            self._one = torch.ones((), dtype=torch.float32, device=device)
        _exponents_kernel[(self._chunks.num_chunks,)](
            self._chunks.rows,
            pointers,
            self._chunks.numels,
            self._rows[1],
            table,
            self._one if divisor is None else divisor,
            self._chunks.num_full,
            DTYPE=_TL[dtype],
            CHUNK=shape.chunk,
            ROWS=shape.rows,
            VECTOR=_VECTOR_BYTES // dtype.itemsize,
            num_warps=shape.warps,
        )
