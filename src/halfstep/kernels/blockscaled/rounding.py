"""Block-scaled formats by emulation: what a tensor is after it was stored as MXFP8 or NVFP4.

No hardware is needed: the fp32 values are rounded to the values that the format can represent, and come back as fp32. Blocks are
consecutive elements of the last dimension, along which matrix products sum; a short last block is a block of its own. Every
rounding is to nearest, ties to even, and saturates at the largest element.

MXFP8 (OCP Microscaling Formats 1.0, section 6.3): 32 e4m3 elements share one power of two, stored as e8m0:

    shared = clamp(floor(log2(max |x|)) - 8, -127, 127)      8 is the exponent of e4m3's largest power of two
    x is stored as e4m3(x / 2^shared)

The largest element of a block is between 256 and 512 after the division, so one above 448 saturates: up to 12.5 % off. That
is the specification's own rule; hardware that rounds the exponent up instead loses a bit of the small elements.

NVFP4 (NVIDIA, as in Transformer Engine): 16 e2m1 elements share an e4m3 scale, and the tensor has one fp32 scale that
places the block scales in e4m3's range. Every quotient and product is an fp32 operation:

    tensor = max |x| of the tensor / (448 * 6)
    block  = e4m3((max |x| of the block / 6) / tensor)
    x is stored as e2m1(x / (block * tensor))

A block whose scale rounds to 0 is 0. Neither format's elements have an infinity: a block with an inf or NaN in it gets a NaN as its scale,
and all of it is NaN. The specification leaves that to the implementation. For NVFP4's tensor scale such blocks do not count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halfstep.precision.formats import FP8_E4M3FN, FP32

__all__ = ["BLOCK_FORMATS", "MXFP8", "NVFP4", "round_mxfp8", "round_nvfp4"]

MXFP8, NVFP4 = "mxfp8", "nvfp4"
_MX_BLOCK, _NV_BLOCK = 32, 16
_E4M3 = (
    FP8_E4M3FN.fraction_bits,
    1 - FP8_E4M3FN.bias,
    FP8_E4M3FN.max,
)  # fraction bits, smallest exponent, largest value
_E2M1 = (1, 0, 6.0)
_E4M3_TOP = 8  # exponent of the largest power of two of e4m3
_E8M0_LEAST, _E8M0_MOST = -127, 127
_MAGNITUDE = 0x7FFFFFFF


@torch.no_grad()
def round_mxfp8(tensor: Tensor) -> Tensor:
    """The tensor as fp32 after a trip through MXFP8."""
    if not tensor.numel():
        return tensor.detach().to(torch.float32)
    blocks, restore = _in_blocks(tensor, _MX_BLOCK)
    bad = ~blocks.isfinite().all(dim=-1, keepdim=True)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    shared = (_exponent(largest) - _E4M3_TOP).clamp(_E8M0_LEAST, _E8M0_MOST)
    # Both products are exact, or so small that the element is 0 anyway.
    rounded = _round(blocks * _power(-shared), *_E4M3) * _power(shared)
    return restore(torch.where(bad, torch.nan, rounded))


@torch.no_grad()
def round_nvfp4(tensor: Tensor) -> Tensor:
    """The tensor as fp32 after a trip through NVFP4."""
    if not tensor.numel():
        return tensor.detach().to(torch.float32)
    blocks, restore = _in_blocks(tensor, _NV_BLOCK)
    bad = ~blocks.isfinite().all(dim=-1, keepdim=True)
    blocks = torch.where(bad, 0.0, blocks)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    tensor_scale = largest.amax() / (_E4M3[2] * _E2M1[2])
    ratio = torch.where(tensor_scale > 0, (largest / _E2M1[2]) / tensor_scale, 0.0)
    scale = _round(ratio, *_E4M3) * tensor_scale
    quotient = torch.where(scale > 0, blocks / scale, blocks * 0.0)  # keeps the sign of a zero
    rounded = _round(quotient, *_E2M1) * scale
    return restore(torch.where(bad, torch.nan, rounded))


BLOCK_FORMATS: dict[str, Callable[[Tensor], Tensor]] = {MXFP8: round_mxfp8, NVFP4: round_nvfp4}


def _in_blocks(tensor: Tensor, size: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The elements as (..., blocks, size), zeros at the end of a short block, and the function that undoes it."""
    values = tensor.detach().to(torch.float32)
    shape = values.shape
    rows = values.reshape(-1, shape[-1] if shape else 1)
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % size))

    def restore(blocks: Tensor) -> Tensor:
        return blocks.reshape(padded.shape)[:, : rows.shape[1]].reshape(shape)

    return padded.reshape(rows.shape[0], -1, size), restore


def _exponent(magnitude: Tensor) -> Tensor:
    """floor(log2) as int32, exactly; -127 for 0 and for subnormals, whose own exponent no format here reaches."""
    bits = magnitude.contiguous().view(torch.int32) & _MAGNITUDE
    return (bits >> FP32.fraction_bits) - FP32.bias


def _power(exponent: Tensor) -> Tensor:
    """2^exponent for exponents from -127 to 127, from its bits: 2^-127 is a subnormal of fp32."""
    normal = (exponent + FP32.bias) << FP32.fraction_bits
    return (
        torch.where(exponent == _E8M0_LEAST, 1 << (FP32.fraction_bits - 1), normal).to(torch.int32).view(torch.float32)
    )


def _round(x: Tensor, fraction_bits: int, smallest_exponent: int, largest: float) -> Tensor:
    """The nearest value of a small format, ties to even, at most `largest`; subnormals have the smallest exponent's ulp."""
    exponent = _exponent(x).clamp(min=smallest_exponent, max=100) - fraction_bits
    ulp = _power(exponent)
    return (torch.round(x / ulp) * ulp).clamp(-largest, largest)
