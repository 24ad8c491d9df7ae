"""Split masters on blocks inside the Triton kernels; `kernels.split` is the reference and explains the format.

Unlike the reference, splitting also clamps: a finite master beyond the dtype's range gives its largest value, as
`kernels.lean` does after the reference's split.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "join_bf16",
    "join_fp16",
    "split_bf16",
    "split_fp16",
    "unless_edited_bf16",
    "unless_edited_fp16",
    "widen_bf16",
]


@triton.jit
def widen_bf16(weight_bits):
    """A bf16 weight (its int16 bits) in fp32."""
    return (weight_bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def join_bf16(weight_bits, low):
    """The fp32 master of a bf16 weight (its int16 bits) and the signed 16 bits stored next to it."""
    joined = ((weight_bits.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)
    return tl.where(joined == joined, joined, widen_bf16(weight_bits))  # NaN: an edited weight, or a NaN already


@triton.jit
def unless_edited_bf16(master, weight_bits):
    """An fp32 master, or the weight where that is not the master's rounding any more."""
    rounded = ((master.to(tl.int32, bitcast=True) + 0x8000) >> 16).to(tl.int16)
    return tl.where(rounded == weight_bits, master, widen_bf16(weight_bits))


@triton.jit
def unless_edited_fp16(master, weight):
    """The same for an fp16 weight."""
    rounded = master.to(tl.float16).to(tl.int16, bitcast=True)
    return tl.where(rounded == weight.to(tl.int16, bitcast=True), master, weight.to(tl.float32))


@triton.jit
def split_bf16(master):
    """A master's bf16 weight as int16 bits (ties away from zero), and the residual.

    A finite master that would round to inf becomes bf16's largest value; that, inf and NaN have no residual. All three are
    what remains when the lower half is cut off: arithmetic makes only quiet NaNs, whose mark is in the upper half.
    """
    bits = master.to(tl.int32, bitcast=True)
    inside = tl.abs(master) < 3.3961775292304601e38  # the tie between bf16's largest value, 0x7F7F, and inf
    high = (bits + tl.where(inside, 0x8000, 0)) >> 16
    low = tl.where(inside, bits - (high << 16), 0)
    return high.to(tl.int16), low.to(tl.int16)


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
    """A master's fp16 weight (ties to even, finite ones clamped to fp16's range), and the residual in ulp / 2^15."""
    finite = tl.abs(master) < float("inf")
    inside = tl.where(finite, tl.minimum(tl.maximum(master, -65504.0), 65504.0), master)
    weight = inside.to(tl.float16)
    residual = master - weight.to(tl.float32)
    # 1 / unit from the exponent bits: a power of two, so the product is exact.
    exponent = (weight.to(tl.int16, bitcast=True).to(tl.int32) >> 10) & 31
    units = residual * ((167 - tl.maximum(exponent, 1)) << 23).to(tl.float32, bitcast=True)
    units = tl.where(tl.abs(master) < 65520.0, units, 0.0)  # a master that rounds to inf has no residual; nor has NaN
    # Adding 1.5 * 2^23 rounds to the nearest, ties to even, as torch does, and leaves the integer in the low bits.
    return weight, (units + 12582912.0).to(tl.int32, bitcast=True).to(tl.int16)
