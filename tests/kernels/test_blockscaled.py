"""MXFP8 and NVFP4 by emulation, against a reference that computes with integers over bit patterns."""

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.kernels.blockscaled.rounding import BLOCK_FORMATS, round_mxfp8, round_nvfp4

NAN, INF = 0x7FC00000, 0x7F800000
# Zeros, the smallest and largest subnormals, the smallest normal, values around 1, the largest, ties of e4m3 and e2m1.
EDGES = (
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x3F7FFFFF, 0x7F7FFFFF, 0xFF7FFFFF,
    *(struct.unpack("<I", struct.pack("<f", x))[0] for x in (0.25, -0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0, 448.0, 464.0, 17.0)),
    0x3F880000, 0x3F980000, 0x00400000, 0x00200000,
)  # fmt: skip


def value(bits):
    """The exact value of an fp32 bit pattern; None for inf and NaN."""
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if exponent == 0xFF:
        return None
    magnitude = Fraction(fraction if exponent == 0 else fraction | 0x800000) * Fraction(2) ** (max(exponent, 1) - 150)
    return -magnitude if bits >> 31 else magnitude


def floor_log2(x):
    """floor(log2(x)) of a positive fraction, with integers alone."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def nearest(x, fraction_bits, smallest_exponent, largest=None):
    """The value of a small format nearest to a fraction, ties to even, saturating at `largest`."""
    if x == 0:
        return Fraction(0)
    size = abs(x)
    quantum = Fraction(2) ** (max(floor_log2(size), smallest_exponent) - fraction_bits)
    count, rest = divmod(size, quantum)
    if rest * 2 > quantum or (rest * 2 == quantum and count % 2):
        count += 1
    result = count * quantum if largest is None else min(count * quantum, Fraction(largest))
    return result if x > 0 else -result


def fp32(x):
    """An operation of fp32: the exact result, rounded."""
    return nearest(x, 23, -126)


def pack(x, negative):
    """The fp32 bit pattern of a value that fp32 can represent; `negative` is the sign of a zero."""
    sign = 0x80000000 if (negative if x == 0 else x < 0) else 0
    size = abs(x)
    if size == 0:
        return sign
    exponent = max(floor_log2(size), -126)
    mantissa = size / Fraction(2) ** (exponent - 23)
    assert mantissa.denominator == 1
    assert mantissa < 1 << 24
    return sign + ((exponent + 126) << 23) + int(mantissa) if mantissa >= 1 << 23 else sign + int(mantissa)


def blocks(bits, size):
    return [bits[i : i + size] for i in range(0, len(bits), size)]


def mxfp8(bits):
    result = []
    for block in blocks(bits, 32):
        values = [value(b) for b in block]
        if None in values:
            result += [NAN] * len(block)
            continue
        largest = max(abs(v) for v in values)
        shared = -127 if largest == 0 else min(max(floor_log2(largest) - 8, -127), 127)
        scale = Fraction(2) ** shared
        result += [pack(nearest(v / scale, 3, -6, 448) * scale, b >> 31) for v, b in zip(values, block, strict=True)]
    return result


def nvfp4(bits):
    every = [[value(b) for b in block] for block in blocks(bits, 16)]
    finite = [abs(v) for values in every if None not in values for v in values]
    tensor = fp32(max(finite, default=Fraction(0)) / (448 * 6))
    result = []
    for values, block in zip(every, blocks(bits, 16), strict=True):
        if None in values:
            result += [NAN] * len(block)
            continue
        largest = max(abs(v) for v in values)
        ratio = fp32(fp32(largest / 6) / tensor) if tensor else Fraction(0)
        scale = fp32(nearest(ratio, 3, -6, 448) * tensor)
        for v, b in zip(values, block, strict=True):
            element = nearest(fp32(v / scale), 1, 0, 6) if scale else Fraction(0)
            result.append(pack(fp32(element * scale), b >> 31))
    return result


def bits_of(function, bits):
    """The result of an emulation on a vector of bit patterns."""
    tensor = torch.tensor([b - (1 << 32) if b >> 31 else b for b in bits], dtype=torch.int32).view(torch.float32)
    return [b & 0xFFFFFFFF for b in function(tensor).view(torch.int32).tolist()]


def is_nan(bits):
    return bits & 0x7FFFFFFF > INF


def check(bits):
    """Every bit is the reference's; any NaN is as good as another."""
    for function, reference in ((round_mxfp8, mxfp8), (round_nvfp4, nvfp4)):
        got, expected = bits_of(function, bits), reference(bits)
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert a == b or (is_nan(a) and is_nan(b)), (function.__name__, i, hex(bits[i]), hex(a), hex(b))


any_bits = st.one_of(st.integers(0, 0xFFFFFFFF), st.sampled_from([*EDGES, NAN, INF, INF | 0x80000000]))
# Neighbouring exponents, as real tensors have: most random patterns are far apart and become 0.
near_one = st.builds(
    lambda s, e, f: (s << 31) | (e << 23) | f, st.integers(0, 1), st.integers(112, 132), st.integers(0, 0x7FFFFF)
)
coarse = st.builds(
    lambda s, e, f: (s << 31) | (e << 23) | (f << 19), st.integers(0, 1), st.integers(112, 132), st.integers(0, 15)
)
lowest = st.builds(lambda s, f: (s << 31) | f, st.integers(0, 1), st.integers(0, 0x3000000))


@settings(max_examples=40)
@given(st.lists(any_bits, min_size=1, max_size=70))
def test_any_bit_pattern_equals_the_reference(bits):
    """Special values, subnormals and all magnitudes, in full and short blocks."""
    check(bits)


@settings(max_examples=40)
@given(
    st.one_of(
        st.lists(near_one, min_size=1, max_size=70),
        st.lists(coarse, min_size=1, max_size=70),
        st.lists(lowest, min_size=1, max_size=40),
    )
)
def test_elements_of_similar_size_equal_the_reference(bits):
    """Ties, saturated elements, subnormal elements and scales at the bottom of fp32."""
    check(bits)


@pytest.mark.parametrize("edge", EDGES)
def test_edges_next_to_each_other_equal_the_reference(edge):
    """Each edge alone, and in a block with 1, the largest number and the smallest."""
    for others in ((), (0x3F800000,), (0x7F7FFFFF,), (0x00000001,), (0x00800000,)):
        check([edge, *others])


def test_known_values():
    """The textbook cases: powers of two survive, a block of NVFP4 has eight magnitudes, the top of an MX block saturates."""
    assert round_mxfp8(torch.tensor([1.0, 0.5, 2.0**-8, 1.96875])).tolist() == [1.0, 0.5, 2.0**-8, 1.75]
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert torch.allclose(round_nvfp4(grid * 7.0), grid * 7.0, rtol=1e-6)
    assert round_nvfp4(torch.tensor([6.0, 5.0, 2.5, 0.25, 0.2500001])).tolist() == pytest.approx(
        [6.0, 4.0, 2.0, 0.0, 0.5]
    )


def test_blocks_do_not_influence_each_other_or_other_rows():
    """A NaN stays in its block, and rows of a matrix are divided separately."""
    x = torch.ones(2, 40)
    x[0, 3] = math.nan
    for emulate, size in ((round_mxfp8, 32), (round_nvfp4, 16)):
        y = emulate(x)
        assert y.isnan().sum() == size
        assert (y[0, size:] == 1).all()
        assert (y[1] == 1).all()


def test_shapes_and_dtypes():
    """Any shape comes back in fp32; nothing is an element too."""
    for emulate in BLOCK_FORMATS.values():
        for shape in ((), (0,), (3, 0), (5,), (2, 3, 33)):
            result = emulate(torch.ones(shape, dtype=torch.bfloat16))
            assert result.shape == shape
            assert result.dtype is torch.float32
            assert (result == 1).all()
