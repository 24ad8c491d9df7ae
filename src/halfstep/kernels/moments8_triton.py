"""8-bit moments on blocks inside the Triton kernels; `kernels.moments8` is the reference and explains the format.

Values come as rows of one block each, so that the scale of a block is a reduction along its row.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode", "encode_signed", "encode_unsigned"]

_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even, left in the low bits


@triton.jit
def decode(codes, scales, SIGNED: tl.constexpr):
    """The fp32 values of codes and the scales of their rows."""
    wide = codes.to(tl.float32)
    if SIGNED:
        values = wide * tl.abs(wide) * (scales * (1 / 16129))  # 127^2
    else:
        values = wide * wide * (scales * (1 / 65025))  # 255^2
    return values


@triton.jit
def encode_signed(values):
    """int8 codes of values of either sign, rounded to the nearest, and the scales of their rows."""
    scales = tl.max(tl.abs(values), axis=1)
    codes = tl.sqrt(tl.abs(values)) * (127 * tl.rsqrt(tl.where(scales > 0, scales, 1.0)))[:, None]
    codes = (tl.where(values < 0, -codes, codes) + _ROUNDER).to(tl.int32, bitcast=True)
    return codes.to(tl.int8), scales


@triton.jit
def encode_unsigned(values, roots, offsets, seed):
    """uint8 codes of values of 0 or more, rounded at random by offset and seed, and the scales of their rows."""
    scales = tl.max(values, axis=1)
    # On the grid of codes; a little below 255 at most, so that no code is rounded up past it.
    exact = roots * (254.9998 * tl.rsqrt(tl.where(scales > 0, scales, 1.0)))[:, None]
    # A value above zero gets a code above zero, because the update divides by its root.
    exact = tl.minimum(tl.maximum(exact, 1.0), roots * 1e30)
    grid = (exact - 0.5) + _ROUNDER  # rounded down, or one less at an integer, which the probability corrects
    below = grid - _ROUNDER
    # The probability that makes the value, not its root, correct on average; multiplied out, as a division costs more.
    up = _noise(offsets, seed) * (2 * below + 1) < (exact - below) * (exact + below)
    codes = grid.to(tl.int32, bitcast=True) + up.to(tl.int32)
    return codes.to(tl.uint8), scales


@triton.jit
def _noise(offsets, seed):
    """Numbers in [0, 1) from an integer hash of position and step, as in the reference."""
    h = offsets.to(tl.uint32) * 0x9E3779B1 + seed
    h = (h ^ (h >> 15)) * 0x2C1B3C6D
    # 23 bits below an exponent of 0 are a number in [1, 2): no conversion.
    return ((h >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
