"""Number formats, compared with torch's finfo and torch's casts."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import HalfstepError
from halfstep.precision import formats
from halfstep.precision.formats import (
    BF16,
    BLOCK8,
    BLOCK8_UNSIGNED,
    FORMATS,
    FORMATS_16_BIT,
    FP8_E4M3FN,
    FP8_E4M3FNUZ,
    FP8_E5M2FNUZ,
    FP16,
    FP32,
    FP64,
    TF32,
    Format,
    canonical_name,
    format_name,
    get_format,
    torch_dtype,
)  # fmt: skip

STORED = [f for f in FORMATS.values() if isinstance(f, Format) and f.torch_name]


def dtype(format_):
    return getattr(torch, format_.torch_name)


@pytest.mark.parametrize("format_", STORED, ids=str)
def test_limits_equal_torchs_finfo(format_):
    """max, smallest normal, bits and bytes are torch's."""
    info = torch.finfo(dtype(format_))
    assert format_.max == info.max
    assert format_.smallest_normal == info.tiny
    assert format_.bits == info.bits
    assert format_.bytes == info.bits / 8
    if format_ is not FP8_E5M2FNUZ:  # torch reports 0.125; its casts have 0.25, as two fraction bits do
        assert format_.epsilon == info.eps


@pytest.mark.parametrize("format_", STORED, ids=str)
def test_smallest_values_survive_torchs_cast_and_half_of_them_does_not(format_):
    """The smallest subnormal is the smallest value torch can store; half of it rounds to zero."""
    if format_ is FP32:
        bits = np.array([1], dtype=np.uint32).view(np.float32)
        assert float(bits[0]) == format_.smallest_subnormal
        return
    tiny = torch.tensor([format_.smallest_subnormal, format_.smallest_subnormal / 2], dtype=torch.float64)
    assert tiny.to(dtype(format_)).double().tolist() == [format_.smallest_subnormal, 0.0]


@pytest.mark.parametrize("format_", STORED, ids=str)
def test_ulp_is_the_gap_between_neighbours_in_torch(format_):
    """x and x + ulp(x) are different values and nothing lies between them."""
    for x in (1.0, 1.5, 3.0, format_.smallest_normal, format_.smallest_subnormal, 0.0, format_.max / 2):
        rounded = format_.round(x)
        step = format_.ulp(rounded)
        there = torch.tensor([rounded + step, rounded + step * 0.499], dtype=torch.float64).to(dtype(format_)).double()
        assert there[0].item() == rounded + step
        assert there[1].item() == rounded


@pytest.mark.parametrize("format_", STORED, ids=str)
@given(x=st.floats(width=32, allow_nan=False))
def test_round_equals_torchs_cast(format_, x):
    """round() gives torch's nearest-even cast; only e4m3fn's overflow differs, which torch 2.13 saturates."""
    cast = torch.tensor(x, dtype=torch.float32).to(dtype(format_)).double().item()
    ours = format_.round(x)
    if abs(x) > FP8_E4M3FN.max and format_ is FP8_E4M3FN and math.isnan(ours):
        assert math.isnan(cast) or abs(cast) == format_.max
    elif math.isnan(ours):
        assert math.isnan(cast)
    else:
        assert cast == ours


def test_tf32_is_fp32s_range_with_fp16s_precision_in_four_bytes():
    """TF32 is a reading of fp32, not a smaller storage."""
    assert TF32.smallest_normal == FP32.smallest_normal
    assert TF32.epsilon == FP16.epsilon
    assert TF32.bits == 19
    assert TF32.bytes == 4


def test_the_two_16_bit_formats_trade_range_for_precision():
    """The facts every explanation of mixed precision rests on."""
    assert FP16.max == 65504
    assert FP16.smallest_subnormal == 2.0**-24
    assert BF16.max > 3.38e38
    assert BF16.epsilon == 8 * FP16.epsilon
    assert (FP8_E4M3FN.max, FP8_E4M3FNUZ.max) == (448, 240)


def test_ulp_of_nothing_finite_is_nan():
    """inf and NaN have no neighbours."""
    assert math.isnan(FP16.ulp(math.inf))
    assert math.isnan(FP16.ulp(math.nan))


@pytest.mark.parametrize("block", [BLOCK8, BLOCK8_UNSIGNED], ids=str)
@given(values=st.lists(st.floats(-1, 1), min_size=1, max_size=40))
def test_block_format_holds_every_value_within_half_an_ulp(block, values):
    """Encoding on the companded grid errs by half the distance between codes, and a quarter of the first code more.

    The nearest code is chosen by the roots: between k^2 and (k+1)^2 the border is (k + 1/2)^2, a quarter below the middle.
    """
    x = torch.tensor(values, dtype=torch.float64)
    if not block.signed:
        x = x.abs()
    scale = x.abs().max().item()
    if scale < 1e-300:
        return
    codes = ((x.abs() / scale) ** (1 / block.power) * block.levels).round()
    back = torch.sign(x) * scale * (codes / block.levels) ** block.power
    assert codes.max() <= block.levels < 2**block.bits
    for value, restored in zip(x.tolist(), back.tolist(), strict=True):
        first = scale / block.levels**block.power
        assert abs(value - restored) <= block.ulp(value, scale) * 0.5 + 0.2501 * first + 1e-12 * scale


def test_block_format_costs_little_more_than_a_byte_and_keeps_small_values():
    """One fp32 scale per block of 256; the smallest code lies far below a linear grid's."""
    assert BLOCK8.bytes == 1 + 4 / 256
    assert BLOCK8.max == 1
    assert BLOCK8.smallest == pytest.approx(127**-2)
    assert str(BLOCK8) == "8bit"


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        ("bf16", BF16),
        ("torch.bfloat16", BF16),
        ("float16", FP16),
        ("half", FP16),
        ("FP32", FP32),
        ("8bit", BLOCK8),
        ("tf32", TF32),
    ],
)
def test_formats_are_found_by_either_spelling(name, format_):
    """Halfstep's names and torch's lead to the same format."""
    assert get_format(name) is format_


def test_unknown_format_names_the_nearest():
    """A typo is answered with what was meant."""
    with pytest.raises(HalfstepError, match="Did you mean 'bf16'"):
        get_format("bf-16")


@pytest.mark.parametrize("format_", STORED, ids=str)
def test_name_and_dtype_are_inverse(format_):
    """A format's dtype has the format's name, and the name in any spelling leads to the dtype."""
    assert torch_dtype(format_.name) is dtype(format_)
    assert format_name(dtype(format_)) == format_.name
    for spelling in (dtype(format_), str(dtype(format_)), format_.torch_name.upper(), f" {format_.name} "):
        assert canonical_name(spelling) == format_.name
        assert torch_dtype(str(spelling)) is dtype(format_)


def test_every_torch_dtype_has_a_short_name():
    """fp64 has a name although no policy uses it, aliases have their dtype's, and others keep torch's name."""
    assert format_name(torch.float64) == canonical_name("double") == FP64.name
    assert [canonical_name(name) for name in ("half", "float", "torch.half")] == ["fp16", "fp32", "fp16"]
    assert [format_name(d) for d in (torch.int8, torch.complex64)] == ["int8", "complex64"]


@pytest.mark.parametrize("name", ["tf32", "8bit"])
def test_a_format_that_torch_cannot_store_has_no_dtype(name):
    """TF32 is a way to multiply and 8bit a block of codes: asking for their dtype is an error with the alternatives."""
    with pytest.raises(HalfstepError, match="no torch dtype.*bf16"):
        torch_dtype(name)


def test_the_16_bit_tables_agree():
    """The names, the dtypes autocast computes in and the 16-bit dtypes are one list, read from the formats."""
    assert list(formats.COMPUTE_DTYPES) == list(FORMATS_16_BIT) == [f.name for f in STORED if f.bytes == 2]
    assert tuple(formats.COMPUTE_DTYPES.values()) == formats.DTYPES_16_BIT
    assert set(formats.DTYPES_16_BIT) == {torch.float16, torch.bfloat16}
    with pytest.raises(AttributeError, match="DTYPES_8_BIT"):
        _ = formats.DTYPES_8_BIT


def test_formats_import_without_torch():
    """The table, its spellings and its sizes need no torch."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from halfstep.precision.formats import FORMATS, FORMATS_16_BIT, canonical_name\n"
        "print(FORMATS[canonical_name('torch.bfloat16')].bytes, *FORMATS_16_BIT)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "bf16", "fp16"]
