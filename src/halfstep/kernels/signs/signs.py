"""Signs of fp32 numbers, packed 8 to a byte, first number in the highest bit: what the 1-bit optimizers send.

A bit is 1 for a number of 0 or more, and so for both zeros: `-0.0 >= 0`. NaN gives 0. A sign has no zero, so that what is
unpacked is +1 or -1 for every element, also for one that was 0.

The functions here choose the Triton kernel where it runs (`signs_triton`); the references are torch alone, and give the same
bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.kernels.available import triton_runs_on

__all__ = ["pack_signs", "reference_pack", "reference_unpack", "sign_of", "unpack_signs"]

_WEIGHTS = (128, 64, 32, 16, 8, 4, 2, 1)


def sign_of(values: Tensor) -> Tensor:
    """+1 where a number is 0 or more, else -1, in fp32: the number that its bit stands for."""
    return (values >= 0).to(torch.float32).mul_(2.0).sub_(1.0)


def pack_signs(values: Tensor) -> Tensor:
    """The signs of contiguous fp32 numbers, a multiple of 8 of them, as a vector of uint8."""
    assert values.numel() % 8 == 0
    assert values.is_contiguous()
    if values.numel() and values.dtype is torch.float32 and triton_runs_on(values.device):
        from halfstep.kernels.signs.signs_triton import pack

        return pack(values)
    return reference_pack(values)


def unpack_signs(packed: Tensor) -> Tensor:
    """The signs of contiguous bytes as a vector of +1 and -1 in fp32, 8 of a byte."""
    assert packed.is_contiguous()
    if packed.numel() and triton_runs_on(packed.device):
        from halfstep.kernels.signs.signs_triton import unpack

        return unpack(packed)
    return reference_unpack(packed)


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
