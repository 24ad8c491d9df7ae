"""Split masters: an fp32 number as a 16-bit weight that the model computes with, and 16 more bits stored next to it.

bf16. The master's 32 bits, read as an integer, are split so that the upper half is the nearest bf16 (ties away
from zero) and the lower half is the rounding error, as a signed number:

    hi = (bits + 0x8000) >> 16          lo = bits - (hi << 16)          bits = (hi << 16) + lo

This is integer arithmetic, so it is exact for every pattern, and it inverts exactly. (Rounding ties to even would
not: lo = -0x8000 and lo = +0x8000 would both be needed, and the second does not fit.) NaN is stored as one NaN,
hi 0x7FC0 and lo 0, because rounding up could carry a NaN's bits into another pattern. A finite master above bf16's
largest value rounds to inf; it still inverts, but the model computes with inf, so the caller must treat it as an
overflow.

The model may change a weight outside the optimizer (pruning, clamping, load_state_dict), and the residual of the old
weight then stays next to the new one. Every pair must therefore join to a number: at most half a 16-bit ulp from the
weight, which is what a residual can represent. Only two kinds of pair are none, and neither comes from a split: a zero
with lo < 0 and an infinity with lo > 0 have the bits of a NaN. They join to the weight itself.

fp16. The weight is the nearest fp16 (ties to even) and the residual is the rounding error, in units of ulp / 2^15
of the weight. fp32 has 13 more fraction bits than fp16 and a unit is two bits finer than that, so for weights that
are normal in fp16 the master is exact. Below 2^-14 fp16's ulp stays at 2^-24, a unit is 2^-39, and the master is
off by at most 2^-40.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["FP16_RESIDUAL_BOUND", "is_rounding", "join", "split"]

FP16_RESIDUAL_BOUND = 2.0**-40  # the largest error of an fp16 split below fp16's normal range
_UNITS_PER_ULP = 15  # as a power of two


def split(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The 16-bit weight nearest to each fp32 master, and the int16 tensor that restores it."""
    if isinstance(master, FakeTensor):  # no numbers: a plan sets up models of many parameters, for their formats alone
        return torch.empty_like(master, dtype=dtype), torch.empty_like(master, dtype=torch.int16)
    if dtype is torch.bfloat16:
        return _split_bf16(master)
    return _split_fp16(master)


def join(weight: Tensor, low: Tensor) -> Tensor:
    """The fp32 master of a split weight; of a weight that was edited since, a number within half a ulp of it."""
    if weight.dtype is torch.bfloat16:
        # int32 arithmetic wraps around like the 32-bit register it stands for. In place: this is a step's peak memory.
        bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(low)
        joined = bits.view(torch.float32)
        return torch.where(joined.isnan(), weight.float(), joined, out=joined)
    wide = weight.float()
    unit = torch.ldexp(torch.ones_like(wide), _unit_exponent(weight))
    # inf and NaN have no residual; inf * 0 would turn the one into the other.
    return torch.where(wide.isfinite() & (low != 0), wide + low.float() * unit, wide)


def is_rounding(weight: Tensor, master: Tensor) -> Tensor:
    """For each element, whether the 16-bit weight is what `split` makes of the fp32 master, as bits."""
    bits = weight.view(torch.int16)
    if weight.dtype is torch.bfloat16:
        return master.view(torch.int32).add(0x8000).bitwise_right_shift_(16) == bits
    return master.to(torch.float16).view(torch.int16) == bits


def _split_bf16(master: Tensor) -> tuple[Tensor, Tensor]:
    bits = master.contiguous().view(torch.int32)
    # Arithmetic shifts keep the sign bit on top; adding 0x8000 may carry into the exponent, which is rounding up.
    # It cannot run over the sign: the largest pattern below NaN is 0x7F800000.
    high = (bits + 0x8000) >> 16
    low = (bits - (high << 16)).to(torch.int16)
    weight = high.to(torch.int16).view(torch.bfloat16)
    nan = master.isnan()
    weight = torch.where(nan, torch.full_like(weight, torch.nan), weight)
    return weight, torch.where(nan, torch.zeros_like(low), low)


def _split_fp16(master: Tensor) -> tuple[Tensor, Tensor]:
    weight = master.to(torch.float16)
    wide = weight.float()
    residual = torch.where(wide.isfinite(), master - wide, torch.zeros_like(wide))
    units = torch.ldexp(residual, -_unit_exponent(weight))
    return weight, units.round().to(torch.int16)


def _unit_exponent(weight: Tensor) -> Tensor:
    """log2 of the residual's unit at each fp16 weight."""
    exponent = (weight.view(torch.int16).to(torch.int32) >> 10) & 31
    # Subnormals share the exponent of the smallest normal: ulp = 2^(e - 25) with e at least 1.
    return exponent.clamp(min=1) - 25 - _UNITS_PER_ULP
