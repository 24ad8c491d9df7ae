"""Packing and unpacking of signs in one launch each; `kernels.signs.signs` is the reference and explains the format."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["pack", "unpack"]

BLOCK = 1024  # bytes of a program: 8192 numbers


@triton.jit(do_not_specialize=["num_bytes"])
def _pack_kernel(
    values,  # fp32 (8 * num_bytes,)
    packed,  # uint8 (num_bytes,)
    num_bytes,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)
    inside = place < num_bytes
    numbers = tl.load(values + place[:, None] * 8 + bit[None, :], mask=inside[:, None], other=0.0)
    bits = (numbers >= 0).to(tl.int32) << (7 - bit)[None, :]
    tl.store(packed + place, tl.sum(bits, axis=1).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["num_bytes"])
def _unpack_kernel(
    packed,  # uint8 (num_bytes,)
    signs,  # fp32 (8 * num_bytes,)
    num_bytes,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)
    inside = place < num_bytes
    bytes_ = tl.load(packed + place, mask=inside, other=0).to(tl.int32)
    bits = (bytes_[:, None] >> (7 - bit)[None, :]) & 1
    tl.store(signs + place[:, None] * 8 + bit[None, :], (2 * bits - 1).to(tl.float32), mask=inside[:, None])


def pack(values: Tensor) -> Tensor:
    """`pack_signs` for at least 8 numbers on a device that runs Triton."""
    num_bytes = values.numel() // 8
    packed = torch.empty(num_bytes, dtype=torch.uint8, device=values.device)
    _pack_kernel[(triton.cdiv(num_bytes, BLOCK),)](values, packed, num_bytes, BLOCK=BLOCK, num_warps=8)
    return packed


def unpack(packed: Tensor) -> Tensor:
    """`unpack_signs` for at least one byte on a device that runs Triton."""
    num_bytes = packed.numel()
    signs = torch.empty(8 * num_bytes, dtype=torch.float32, device=packed.device)
    _unpack_kernel[(triton.cdiv(num_bytes, BLOCK),)](packed, signs, num_bytes, BLOCK=BLOCK, num_warps=8)
    return signs
