"""Pieces shared by the Triton kernels: pointers out of tables, exact roundings, split masters."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["join_bf16", "join_fp16", "lerp", "load", "noise", "round_bf16", "split_bf16", "split_fp16", "store"]


@triton.jit
def load(place, offsets, left, FULL: tl.constexpr):
    """A block at `place`; unmasked and in 16-byte vectors if the chunk is full and aligned, else what there is, and 0."""
    if FULL:
        return tl.load(tl.multiple_of(place, 16) + offsets)
    return tl.load(place + offsets, mask=offsets < left, other=0)


@triton.jit
def store(place, offsets, values, left, FULL: tl.constexpr):
    """The counterpart of `load`."""
    if FULL:
        tl.store(tl.multiple_of(place, 16) + offsets, values)
    else:
        tl.store(place + offsets, values, mask=offsets < left)


@triton.jit
def noise(place, step):
    """Numbers in [0, 1) from an integer hash of place and step, as in `kernels.moments8`."""
    h = place.to(tl.uint32) * 0x9E3779B1 + step.to(tl.uint32) * 0x85EBCA77
    h = (h ^ (h >> 15)) * 0x2C1B3C6D
    h = (h ^ (h >> 12)) * 0x297A2D39
    h = h ^ (h >> 15)
    return (h >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def join_bf16(weight_bits, low):
    """The fp32 master of a bf16 weight (its int16 bits) and the signed 16 bits beside it."""
    return ((weight_bits.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def split_bf16(master):
    """The master held inside bf16's range, its bf16 weight as int16 bits (ties away from zero), what was rounded off."""
    largest = 3.3895313892515355e38
    master = tl.where((master > largest) & (master < float("inf")), largest, master)
    master = tl.where((master < -largest) & (master > -float("inf")), -largest, master)
    bits = master.to(tl.int32, bitcast=True)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    nan = master != master
    high = tl.where(nan, 0x7FC0, high)
    low = tl.where(nan, 0, low)
    return master, high.to(tl.int16), low.to(tl.int16)


@triton.jit
def round_bf16(x):
    """The bits of the nearest bf16, ties to even; Triton's interpreter would truncate a plain cast."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def _fp16_unit(weight):
    """The residual's unit at an fp16 weight, ulp / 2^15, as an fp32 number made from its exponent bits."""
    exponent = (weight.to(tl.int16, bitcast=True).to(tl.int32) >> 10) & 31
    power = tl.maximum(exponent, 1) - 40  # ulp = 2^(e - 25)
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def join_fp16(weight, low):
    """The fp32 master of an fp16 weight and its residual."""
    wide = weight.to(tl.float32)
    finite = tl.abs(wide) < float("inf")
    return tl.where(finite & (low != 0), wide + low.to(tl.float32) * _fp16_unit(weight), wide)


@triton.jit
def split_fp16(master):
    """The master held inside fp16's range, its fp16 weight (ties to even), what was rounded off in ulp / 2^15."""
    finite = tl.abs(master) < float("inf")
    master = tl.where(finite, tl.minimum(tl.maximum(master, -65504.0), 65504.0), master)
    weight = master.to(tl.float16)
    residual = tl.where(finite, master - weight.to(tl.float32), 0.0)
    units = residual / _fp16_unit(weight)  # a power of two: exact
    rounded = tl.where(units >= 0, tl.floor(units + 0.5), tl.ceil(units - 0.5))
    return master, weight, rounded.to(tl.int16)


@triton.jit
def lerp(old, new, weight):
    """torch.lerp: exact at weight 1 as well as at 0."""
    return tl.where(weight < 0.5, old + weight * (new - old), new - (new - old) * (1 - weight))
