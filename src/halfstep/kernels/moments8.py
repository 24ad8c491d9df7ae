"""8-bit moments: a block of 256 values, one fp32 scale, and a code per value on a companded grid.

    scale = the largest magnitude in the block          code = levels * sqrt(|x| / scale), with the sign of x
    x     = scale * (code / levels)^2

The square root spreads the codes so that small values get some: the smallest is scale / 127^2 for the signed first
moment and scale / 255^2 for the second, where a linear grid would end at scale / 127.

The first moment is rounded to the nearest code. The second moves by a thousandth of itself per step, far less than the
distance between codes, so rounding to the nearest would freeze it; it is rounded up or down at random, in proportion,
which is correct on average. The random numbers are a hash of position and step: the same in every run. A second
moment above zero never becomes zero, because the update divides by its root.

Error bounds, with d the distance between the codes around x: d / 2 + scale / (4 levels^2) for the first moment (the
nearest code is chosen by the roots), d for the second, and d <= 2 sqrt(|x| scale) / levels + scale / levels^2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.precision.formats import BLOCK8, BLOCK8_UNSIGNED

__all__ = ["BLOCK", "decode", "encode_signed", "encode_unsigned", "num_blocks"]

BLOCK = BLOCK8.block
_MASK = 0xFFFFFFFF


def num_blocks(numel: int) -> int:
    """Blocks, and so scales, of `numel` values."""
    return (numel + BLOCK - 1) // BLOCK


def encode_signed(values: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes in the shape of `values`, and the scales of its blocks."""
    rows, scales = _blocks(values)
    root = rows.abs().sqrt() * (BLOCK8.levels * _divisor(scales).rsqrt())
    codes = torch.where(rows < 0, -root.round(), root.round()).to(torch.int8)
    return codes.reshape(-1)[: values.numel()].reshape(values.shape), scales


def encode_unsigned(values: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes of values of 0 or more, rounded at random by position and `step`, and the scales of its blocks."""
    rows, scales = _blocks(values)
    root = rows.sqrt()
    # On the grid of codes; a little below the last at most, so that no code is rounded up past it, and at least 1
    # above zero, because the update divides by the root.
    exact = root * ((BLOCK8_UNSIGNED.levels - 2e-4) * _divisor(scales).rsqrt())
    exact = torch.minimum(exact.clamp(min=1), root * 1e30)
    below = (exact - 0.5).round()  # down, or one less at an integer, which the probability corrects
    # The probability that makes the value, not its root, correct on average: (exact^2 - below^2) / (2 below + 1).
    up = _noise(rows, step) * (2 * below + 1) < (exact - below) * (exact + below)
    codes = torch.where(up, below + 1, below).to(torch.uint8)
    return codes.reshape(-1)[: values.numel()].reshape(values.shape), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 values of a tensor's codes."""
    levels = BLOCK8.levels if codes.dtype is torch.int8 else BLOCK8_UNSIGNED.levels
    rows = _padded(codes.reshape(-1).float())
    return (rows * rows.abs() * (scales / levels**2)[:, None]).reshape(-1)[: codes.numel()].reshape(codes.shape)


def _padded(flat: Tensor) -> Tensor:
    short = -flat.numel() % BLOCK
    return torch.nn.functional.pad(flat, (0, short)).reshape(-1, BLOCK)


def _blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    rows = _padded(values.reshape(-1).float())
    return rows, rows.abs().amax(dim=1) if rows.numel() else rows.new_zeros(0)


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, torch.ones_like(scales))[:, None]


def _noise(rows: Tensor, step: Tensor) -> Tensor:
    """Numbers in [0, 1), one for each position in `rows`, the same on every device."""
    position = torch.arange(rows.numel(), device=rows.device).reshape(rows.shape)
    return _noise_at(position, step.to(torch.int64))


def _noise_at(position: Tensor, step: Tensor) -> Tensor:
    """An integer hash of position and step, as a number: one round is enough for rounding, and cheap in a kernel."""
    h = (position * 0x9E3779B1 + step * 0x85EBCA77) & _MASK
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & _MASK
    return (h >> 9).to(torch.float32) * 2.0**-23
