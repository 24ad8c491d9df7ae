"""The smallest and the largest element of each tensor of a list, without a wait.

Torch's aminmax is one launch per tensor, slow for 16 bits, and returns two tensors. On a GPU one launch measures a whole list
(`ranges_triton.py`). It never computes with floats: read as an integer of its width, a float is ordered like its value once the
bits below the sign of a negative number are flipped, and a NaN, whatever its bits, lies beyond an infinity at one of the ends.
So one table of integers contains the extremes and whether there is a NaN, and the host decodes it after one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.gradstats import dense_values
from halfstep.kernels.table import Extent, to_device
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["decode", "extent_of", "launch_ranges", "reference_range"]

_KERNEL_DTYPES = (torch.float32, *DTYPES_16_BIT)
_VECTOR_BYTES = 16  # the widest load of a thread
_PLAIN = (Tensor, torch.nn.Parameter)  # not subclasses, whose memory may be elsewhere


def extent_of(tensor: Tensor) -> Extent | None:
    """The memory of a tensor, in any order of its elements; None where only the reference can read it."""
    if tensor.dtype not in _KERNEL_DTYPES or type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return None
    pointer, numel = tensor.data_ptr(), tensor.numel()
    if not tensor.is_contiguous():
        return _extent_of_view(tensor, pointer) if numel else None
    return Extent(pointer, numel, numel, numel) if pointer and not tensor.is_neg() else None


def _extent_of_view(tensor: Tensor, pointer: int) -> Extent | None:
    inner, rows, pitch = 1, 1, 0
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in sizes if size > 1 and stride):
        if rows == 1 and stride == inner:
            inner *= size
        elif rows == 1:
            rows, pitch = size, stride
        elif stride == rows * pitch:
            rows *= size
        else:
            return None
    numel = inner * rows
    if rows == 1:
        pitch = inner
    elif any(n % (_VECTOR_BYTES // tensor.itemsize) for n in (inner, pitch)) or pointer % _VECTOR_BYTES or numel >> 31:
        return None  # the kernel reads rows in whole vectors, and numbers them in 32 bits
    return None if not pointer or tensor.is_neg() else Extent(pointer, numel, inner, pitch)


def launch_ranges(extents: Sequence[Extent], item_bytes: Sequence[int], device: torch.device) -> Tensor:
    """Measure memory on one device: a table for `decode`, int32 (T, 2), on it."""
    from halfstep.kernels.ranges.ranges_triton import CHUNK, fill

    groups: dict[
        tuple[int, bool, bool], list[int]
    ] = {}  # by the variant of the kernel; small ones do not share a grid with large
    for row, (extent, width) in enumerate(zip(extents, item_bytes, strict=True)):
        groups.setdefault((width, extent.inner != extent.numel, extent.numel <= CHUNK), []).append(row)
    order = [row for rows in groups.values() for row in rows]
    about = to_device(np.array([(*extents[row], row) for row in order], dtype=np.int64), device)
    table = torch.full((len(extents), 2), -(1 << 31), dtype=torch.int32, device=device)
    start = 0
    for (width, pitched, _), rows in groups.items():
        part = about[start : start + len(rows)]
        fill(table, part, max(extents[row].numel for row in rows), width, pitched=pitched)
        start += len(rows)
    return table


def decode(table: np.ndarray, dtypes: Sequence[torch.dtype]) -> list[tuple[float, float]]:
    """The smallest and largest element from each row of a table; both NaN if there is a NaN."""
    keys = table.astype(np.int32)
    keys[:, 0] = ~keys[:, 0]  # stored so that both columns are maxima
    numbers = np.empty(keys.shape, dtype=np.float64)
    for dtype in set(dtypes):
        rows = np.array([each is dtype for each in dtypes])
        bits = keys[rows]
        bits ^= (bits >> 31) & (0x7FFFFFFF if dtype.itemsize == 4 else 0x7FFF)
        if dtype is torch.float16:
            floats = bits.astype(np.uint16).view(np.float16)
        else:
            floats = (bits if dtype is torch.float32 else bits << 16).view(np.float32)
        with np.errstate(invalid="ignore"):  # signalling NaN
            numbers[rows] = floats
    numbers[np.isnan(numbers).any(axis=1)] = np.nan
    lows, highs = numbers[:, 0].tolist(), numbers[:, 1].tolist()
    return list(zip(lows, highs, strict=True))


def reference_range(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same by torch alone, for every layout and floating-point dtype; None if there are no elements."""
    values = dense_values(tensor.detach())
    if values.numel() == 0:
        return None
    if values.element_size() == 1:  # fp8: no arithmetic; exact in fp32
        values = values.float()
    low, high = torch.aminmax(values)
    return low, high
