"""How the elements of tensors are spread over powers of two: the counts behind every statement about underflow.

Written as an integer, the magnitude of a float is its exponent field followed by its fraction, so the exponent of an exact
quotient needs no division:

    floor(log2(|x| / d)) = (bits(x) - bits(d)) >> fraction bits

because the difference of the fractions borrows 1 from the exponents exactly if the fraction of x is the smaller one. Subnormals
are first rewritten with the exponent that they would have with an unlimited range. Nothing is rounded, and the counts are exact
for every dtype; this is what allows gradients to be counted while they are still multiplied by the loss scale.

Everything about a tensor is one row of an int64 table on the device (`Counts.table`), so that a sample of a model is one copy to
the host: 256 bins, the numbers of NaN, inf and zeros, and two columns for the extremes. Those are maxima of integers that are 0
where there is no element, so that partial results combine without initial values: the bits in fp32 of the largest finite
magnitude, and 2^32 less those of the smallest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.gradstats import dense_values
from halfstep.kernels.table import BIN_OF_1, INF, LARGEST, NAN, NUM_BINS, NUM_COLUMNS, SMALLEST, ZEROS, copied_to
from halfstep.precision.formats import DTYPES_16_BIT, FP32, FP64, Format

__all__ = [
    "BIN_OF_1",
    "INF",
    "LARGEST",
    "NAN",
    "NUM_BINS",
    "NUM_COLUMNS",
    "SMALLEST",
    "ZEROS",
    "Counts",
    "count_exponents",
    "empty_table",
    "extremes_of",
    "reference_rows",
]

_KERNEL_DTYPES = (torch.float32, *DTYPES_16_BIT)
_PIECE = 1 << 22  # elements that the reference looks at in one go: its temporary tensors have 8 bytes per element
_BITS = {torch.float32: (torch.int32, FP32), torch.float64: (torch.int64, FP64)}


@dataclass(frozen=True)
class Counts:
    """Exponents of the elements of some tensors, one row per tensor; everything is on the device."""

    table: Tensor  # int64 (T, NUM_COLUMNS)
    divisor: Tensor | None  # what the elements were divided by for the bins

    @property
    def bins(self) -> Tensor:
        """Finite elements other than 0 with floor(log2(|x| / divisor)) = bin - BIN_OF_1: int64 (T, 256).

        The first and the last bin include everything beyond them.
        """
        return self.table[:, :NUM_BINS]

    @property
    def special(self) -> Tensor:
        """Numbers of NaN, infinite and zero elements: int64 (T, 3)."""
        return self.table[:, NAN : ZEROS + 1]

    @property
    def extremes(self) -> Tensor:
        """Largest finite and smallest non-zero magnitude, not divided: fp32 (T, 2), 0 where there is none."""
        return extremes_of(self.table)


def extremes_of(table: Tensor) -> Tensor:
    """The columns LARGEST and SMALLEST of a table as fp32 magnitudes."""
    largest, smallest = table[:, LARGEST], table[:, SMALLEST]
    bits = torch.stack((largest, torch.where(smallest > 0, (1 << 32) - smallest, 0)), dim=1)
    return bits.to(torch.int32).view(torch.float32)


def empty_table(num_tensors: int, device: torch.device) -> Tensor:
    """The table before anything was counted."""
    return torch.zeros((num_tensors, NUM_COLUMNS), dtype=torch.int64, device=device)


@torch.no_grad()
def count_exponents(
    tensors: Sequence[Tensor], divisor: Tensor | None = None, tables: dict[Any, Any] | None = None
) -> Counts:
    """Count the elements of each tensor by the exponent of |x| / divisor, without waiting for the device.

    On a GPU all tensors of one dtype are counted by one launch. `tables` is a dictionary that the caller passes at every call
    for the same list of tensors: the kernel's tables are stored in it. Sparse tensors count their values and complex ones both
    parts. fp8 is read through bf16, fp64 by torch alone; the extremes of fp64 are rounded to fp32. The sign of the divisor does not
    matter. A divisor that is 0 or not finite, which no step can use, counts as 1.
    """
    tables = {} if tables is None else tables
    device = tensors[0].device if tensors else torch.device("cpu")
    values = tensors if _are_alike(tensors) else [_packed(_readable(tensor)) for tensor in tensors]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    if values is tensors:
        groups[device, tensors[0].dtype] = list(range(len(tensors)))
    else:
        for row, value in enumerate(values):
            groups.setdefault((value.device, value.dtype), []).append(row)
    table = empty_table(len(tensors), device)
    for (where, dtype), rows in groups.items():
        part = table if where == device else empty_table(len(tensors), where)
        local = None if divisor is None else copied_to(divisor.detach(), where, torch.float32)
        group = values if len(rows) == len(values) else [values[row] for row in rows]
        if triton_runs_on(where) and dtype in _KERNEL_DTYPES:
            from halfstep.kernels.exponents_triton import ExponentCounter

            counter: ExponentCounter | None = tables.get((where, dtype))
            if counter is None:
                counter = tables[where, dtype] = ExponentCounter()
            counter.add(group, rows, local, part)
        else:
            reference_rows(group, rows, local, part)
        if part is not table:  # rows of tensors on another device are 0 so far
            table += copied_to(part, device)
    return Counts(table, divisor)


def reference_rows(values: Sequence[Tensor], rows: Sequence[int], divisor: Tensor | None, table: Tensor) -> None:
    """Add each tensor to its row of the table, with torch alone."""
    for value, row in zip(values, rows, strict=True):
        wide = torch.float64 if value.dtype is torch.float64 else torch.float32
        integer, fmt = _BITS[wide]
        one = torch.ones((), dtype=wide, device=value.device)
        d = one if divisor is None else divisor.abs().to(wide)
        d = torch.where(d.isfinite() & (d > 0), d, one)
        divisor_bits = _without_subnormals(d.view(integer).to(torch.int64), fmt)
        for piece in _pieces(value.detach()):
            _add(table[row], piece.to(wide).view(integer).to(torch.int64), divisor_bits, fmt)


def _add(row: Tensor, signed: Tensor, divisor_bits: Tensor, fmt: Format) -> None:
    """Add elements to a row; `signed` are their bits, with the sign."""
    bits = signed & ((1 << (8 * fmt.bytes - 1)) - 1)
    inf = ((1 << fmt.exponent_bits) - 1) << fmt.fraction_bits
    exponent = (_without_subnormals(bits, fmt) - divisor_bits) >> fmt.fraction_bits
    column = (exponent + BIN_OF_1).clamp(0, NUM_BINS - 1)
    for mask, special in ((bits == 0, ZEROS), (bits == inf, INF), (bits > inf, NAN)):
        column = torch.where(mask, special, column)
    row[:LARGEST].index_add_(0, column, torch.ones_like(column))  # not bincount, which waits for the GPU
    usable = (bits > 0) & (bits < inf)
    in_fp32 = bits if fmt is FP32 else _fp32_bits(bits)
    row[LARGEST] = torch.maximum(row[LARGEST], torch.where(usable, in_fp32, 0).max())
    row[SMALLEST] = torch.maximum(row[SMALLEST], torch.where(usable, (1 << 32) - in_fp32, 0).max())


def _without_subnormals(bits: Tensor, fmt: Format) -> Tensor:
    """Bits in which a subnormal has an implicit 1 like other numbers, and an exponent field of 0 or less."""
    fraction = bits.clamp(min=1)
    # fp64 represents every fraction exactly, and its exponent is the position of the leading 1.
    top = (fraction.to(torch.float64).view(torch.int64) >> FP64.fraction_bits) - FP64.bias
    missing = (fmt.fraction_bits - top).clamp(min=0)
    return torch.where(bits < 1 << fmt.fraction_bits, (fraction << missing) - (missing << fmt.fraction_bits), bits)


def _fp32_bits(bits: Tensor) -> Tensor:
    """Bits in fp32 of positive fp64 numbers, within fp32's range and not 0."""
    fp32 = bits.view(torch.float64).clamp(FP32.smallest_subnormal, FP32.max).to(torch.float32)
    return fp32.view(torch.int32).to(torch.int64)


def _pieces(value: Tensor) -> Iterator[Tensor]:
    if value.numel():
        yield from torch.split(value.reshape(-1), _PIECE)


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel can read all tensors as they are: the usual list, for which the host should do little."""
    if not tensors or tensors[0].dtype not in _KERNEL_DTYPES:
        return False
    dtype, device = tensors[0].dtype, tensors[0].device
    return all(
        t.dtype is dtype and t.layout is torch.strided and t.is_contiguous() and t.device == device for t in tensors
    )


def _readable(tensor: Tensor) -> Tensor:
    """The real, dense elements of a tensor in a dtype that the counting knows."""
    values = dense_values(tensor.detach())
    if not values.is_floating_point():
        raise SettingError(f"Exponents of a tensor of {values.dtype} cannot be counted. Pass floating-point tensors.")
    return values.to(torch.bfloat16) if values.element_size() == 1 else values  # every 8-bit format fits exactly


def _packed(value: Tensor) -> Tensor:
    """The same elements without gaps in memory, in any order: they are only counted."""
    if value.is_contiguous():
        return value
    expected = 1
    for size, stride in sorted(zip(value.shape, value.stride(), strict=True), key=lambda pair: pair[::-1]):
        if size > 1 and stride != expected:
            return value.contiguous()
        expected *= size
    return value
