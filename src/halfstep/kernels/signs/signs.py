"""Signs of fp32 numbers, packed 8 to a byte, first number in the highest bit: what the 1-bit optimizers send.

A bit is 1 for a number of 0 or more, and so for both zeros: `-0.0 >= 0`. NaN gives 0. A sign has no zero, so that what is
unpacked is +1 or -1 for every element, also for one that was 0.

The functions here choose the Triton kernel where it runs (`signs_triton`); the references are torch alone, and give the same
bits. On a CPU, packing multiplies 8 bytes of 0 and 1 as one integer, and unpacking reads a table: 2 and 6 times as
fast (8 M numbers, one core of a Neoverse-N1).
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor

from halfstep.kernels.available import triton_runs_on

__all__ = ["pack_signs", "reference_pack", "reference_unpack", "unpack_signs"]

_WEIGHTS = (128, 64, 32, 16, 8, 4, 2, 1)
# Byte k of a little-endian integer is at bit 8k; times 2^(63 - 9k) its lowest bit is bit 7 - k of the highest byte, and no two others meet.
_GATHER = sum(2 ** (63 - 9 * k) for k in range(1, 8)) - 2**63


def pack_signs(values: Tensor) -> Tensor:
    """The signs of contiguous fp32 numbers, a multiple of 8 of them, as a vector of uint8."""
    assert values.numel() % 8 == 0
    assert values.is_contiguous()
    if values.numel() and values.dtype is torch.float32 and triton_runs_on(values.device):
        from halfstep.kernels.signs.signs_triton import pack

        return pack(values)
    return _pack_on_cpu(values) if _is_fast(values.device) else reference_pack(values)


def unpack_signs(packed: Tensor) -> Tensor:
    """The signs of contiguous bytes as a vector of +1 and -1 in fp32, 8 of a byte."""
    assert packed.is_contiguous()
    if packed.numel() and triton_runs_on(packed.device):
        from halfstep.kernels.signs.signs_triton import unpack

        return unpack(packed)
    return _unpack_on_cpu(packed) if _is_fast(packed.device) else reference_unpack(packed)


def reference_pack(values: Tensor) -> Tensor:
    """`pack_signs` by torch alone."""
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=values.device)
    bits = (values.reshape(-1, 8) >= 0).to(torch.uint8)
    return (bits * weights).sum(dim=1, dtype=torch.uint8)


def reference_unpack(packed: Tensor) -> Tensor:
    """`unpack_signs` by torch alone."""
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=packed.device)
    bits = (packed.reshape(-1, 1) & weights) != 0
    return bits.to(torch.float32).mul_(2.0).sub_(1.0).reshape(-1)


def _is_fast(device: torch.device) -> bool:
    return device.type == "cpu" and sys.byteorder == "little"


def _pack_on_cpu(values: Tensor) -> Tensor:
    bits = (values.reshape(-1) >= 0).view(torch.int64)
    packed: Tensor = (bits * _GATHER >> 56).bitwise_and_(255).to(torch.uint8)
    return packed


def _unpack_on_cpu(packed: Tensor) -> Tensor:
    return _table().index_select(0, packed.reshape(-1).to(torch.int32)).reshape(-1)


@functools.cache
def _table() -> Tensor:
    """The signs of each byte."""
    return reference_unpack(torch.arange(256, dtype=torch.uint8)).view(256, 8)
