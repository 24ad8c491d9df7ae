"""Pieces shared by the Triton kernels: pointers out of tables, exact roundings, split masters."""

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = [
    "divide_quickly",
    "join_bf16",
    "join_fp16",
    "load",
    "noise",
    "place",
    "round_bf16",
    "split_bf16",
    "split_fp16",
    "store",
]


@triton.jit
def place(entry, start, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """The address of a chunk, from a table's entry.

    `multiple_of` must stand where the pointer is made. Said of an argument of a function it is lost when the function is
    inlined, and every load comes apart into single elements: 64 load instructions instead of 9 for a chunk.
    """
    at = tl.load(entry).to(tl.pointer_type(DTYPE)) + start
    if FULL:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit
def load(at, offsets, left, FULL: tl.constexpr):
    """A block at `at`; unmasked and in 16-byte vectors if the chunk is full and aligned, else what there is, and 0."""
    if FULL:
        return tl.load(at + offsets)
    return tl.load(at + offsets, mask=offsets < left, other=0)


@triton.jit
def store(at, offsets, values, left, FULL: tl.constexpr):
    """The counterpart of `load`."""
    if FULL:
        tl.store(at + offsets, values)
    else:
        tl.store(at + offsets, values, mask=offsets < left)


if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter has no device libraries

    @triton.jit
    def divide_quickly(a, b):
        """a / b."""
        return a / b

else:
    from triton.language.extra import libdevice

    @triton.jit
    def divide_quickly(a, b):
        """a / b to 2 ulp, in two instructions instead of seven; b at most 2^126."""
        return libdevice.fast_dividef(a, b)


@triton.jit
def noise(offsets, seed):
    """Numbers in [0, 1) from an integer hash of place and step, as in `kernels.moments8`."""
    h = offsets.to(tl.uint32) * 0x9E3779B1 + seed
    h = (h ^ (h >> 15)) * 0x2C1B3C6D
    # 23 bits below an exponent of 0 are a number in [1, 2): no conversion.
    return ((h >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def join_bf16(weight_bits, low):
    """The fp32 master of a bf16 weight (its int16 bits) and the signed 16 bits beside it."""
    return ((weight_bits.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def split_bf16(master):
    """A master's bf16 weight as int16 bits (ties away from zero), and what was rounded off.

    A finite master that would round to inf is held at bf16's largest value; NaN becomes the one NaN, without a rest.
    """
    bits = master.to(tl.int32, bitcast=True)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    beyond = (high & 0x7FFF) >= 0x7F80  # inf, NaN, or a number rounded up to inf, which has a rest below zero
    high = tl.where(beyond & (low < 0), high - 1, high)
    high = tl.where(master != master, 0x7FC0, high)
    low = tl.where(beyond, 0, low)
    return high.to(tl.int16), low.to(tl.int16)


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
    """A master's fp16 weight (ties to even, finite ones held inside fp16's range), and the rest in ulp / 2^15."""
    finite = tl.abs(master) < float("inf")
    inside = tl.where(finite, tl.minimum(tl.maximum(master, -65504.0), 65504.0), master)
    weight = inside.to(tl.float16)
    residual = tl.where(finite, master - weight.to(tl.float32), 0.0)
    # 1 / unit from the exponent bits: a power of two, so the product is exact.
    exponent = (weight.to(tl.int16, bitcast=True).to(tl.int32) >> 10) & 31
    units = residual * ((167 - tl.maximum(exponent, 1)) << 23).to(tl.float32, bitcast=True)
    units = tl.where(tl.abs(units) <= 16384.0, units, 0.0)  # a master beyond fp16's range has no rest
    # Adding 1.5 * 2^23 rounds to the nearest, ties to even, as torch does, and leaves the integer in the low bits.
    return weight, (units + 12582912.0).to(tl.int32, bitcast=True).to(tl.int16)
