"""Number formats: how many bits, how far they reach, how fine they are.

A binary floating-point format is five facts: bits for the exponent, bits for the fraction, the
exponent's bias, whether its top code is reserved for infinities (IEEE) or used for numbers, and its
bytes in memory. Everything else is computed from those:

    smallest normal     2^(1 - bias)
    smallest subnormal  2^(1 - bias - fraction_bits)
    ulp at x            2^(max(floor(log2 |x|), 1 - bias) - fraction_bits)

Two facts decide mixed precision. fp16 has 10 fraction bits but reaches only 65504 and 2^-24, so its
gradients need a loss scale. bf16 has fp32's exponent and needs none, but has 7 fraction bits: an update
smaller than half an ulp of its weight (2^-9 to 2^-8 of it) is lost, so it needs an fp32 master.

The 8-bit block format is not a float: a block of values shares one fp32 scale (its largest magnitude)
and each value is a code c on a companded grid, value = scale * (c / levels)^2. The square makes the grid
fine near zero, where most of Adam's moments are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfstep.errors import SettingError, unknown
from halfstep.hardware.torch_build import require_torch

if TYPE_CHECKING:
    import torch

    COMPUTE_DTYPES: dict[str, torch.dtype]
    DTYPES_16_BIT: tuple[torch.dtype, ...]

__all__ = [
    "BF16",
    "BLOCK8",
    "BLOCK8_UNSIGNED",
    "COMPUTE_DTYPES",
    "DTYPES_16_BIT",
    "FORMATS",
    "FORMATS_16_BIT",
    "FP8_E4M3FN",
    "FP8_E4M3FNUZ",
    "FP8_E5M2",
    "FP8_E5M2FNUZ",
    "FP16",
    "FP32",
    "FP64",
    "TF32",
    "BlockFormat",
    "Format",
    "canonical_name",
    "format_name",
    "get_format",
    "torch_dtype",
]


@dataclass(frozen=True)
class Format:
    """One binary floating-point format."""

    name: str
    exponent_bits: int
    fraction_bits: int
    bias: int
    bytes: int  # per element
    ieee: bool = True  # the top exponent code is inf and NaN, not numbers
    nan_codes_at_top: int = 0  # without IEEE's rule: how many codes at the top of the range are NaN
    signed_zero: bool = True  # the "uz" formats use the code of -0 for their NaN
    torch_name: str | None = None  # the attribute of torch, where torch can store it

    @property
    def bits(self) -> int:
        """Bits that carry information: sign, exponent and fraction."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def has_inf(self) -> bool:
        """Whether an overflow can show up as an infinity."""
        return self.ieee

    @property
    def max(self) -> float:
        """The largest finite value."""
        top_exponent = 2**self.exponent_bits - (2 if self.ieee else 1) - self.bias
        top_fraction = 2**self.fraction_bits - 1 - self.nan_codes_at_top
        return math.ldexp(1 + top_fraction / 2**self.fraction_bits, top_exponent)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with full precision."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value at all; half of it and less rounds to zero."""
        return math.ldexp(1.0, 1 - self.bias - self.fraction_bits)

    @property
    def epsilon(self) -> float:
        """The ulp at 1."""
        return math.ldexp(1.0, -self.fraction_bits)

    def ulp(self, x: float) -> float:
        """The distance between neighbouring values of this format at `x`."""
        x = abs(x)
        if math.isnan(x) or math.isinf(x):
            return math.nan
        exponent = math.frexp(min(x, self.max))[1] - 1 if x > 0 else 1 - self.bias
        return math.ldexp(1.0, max(exponent, 1 - self.bias) - self.fraction_bits)

    def round(self, x: float) -> float:
        """`x` to the nearest value of this format, ties to even; overflow gives inf, or NaN without infinities.

        (torch from 2.13 saturates e4m3fn instead: its cast of 1e9 is 448.)
        """
        if math.isnan(x) or x == 0:
            return x if self.signed_zero else abs(x)
        overflow = math.copysign(math.inf, x) if self.has_inf else math.nan
        if math.isinf(x):
            return overflow
        # frexp and not min(|x|, max): a value past the top must round with the ulp it would have had.
        exponent = max(math.frexp(x)[1] - 1, 1 - self.bias)
        ulp = math.ldexp(1.0, exponent - self.fraction_bits)
        rounded = round(x / ulp) * ulp  # exact: ulp is a power of two; Python's round is ties-to-even
        if abs(rounded) > self.max:
            return overflow
        return math.copysign(rounded, x) if self.signed_zero or rounded else 0.0

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class BlockFormat:
    """Small integers sharing one scale per block: the 8-bit storage of optimizer moments."""

    name: str
    bits: int
    block: int  # values that share a scale
    levels: int  # codes run from -levels (or 0) to +levels
    signed: bool
    power: int = 2  # value = scale * (code / levels)^power, with the code's sign
    scale_bytes: int = 4  # one fp32 scale per block

    @property
    def bytes(self) -> float:
        """Bytes per value, its share of the block's scale included."""
        return self.bits / 8 + self.scale_bytes / self.block

    @property
    def max(self) -> float:
        """The largest value, as a multiple of the block's largest magnitude."""
        return 1.0

    @property
    def smallest(self) -> float:
        """The smallest non-zero value, as a multiple of the block's largest magnitude."""
        return (1 / self.levels) ** self.power

    def ulp(self, x: float, scale: float = 1.0) -> float:
        """The distance to the next code above |x| in a block whose largest magnitude is `scale`."""
        code = min(int(self.levels * (abs(x) / scale) ** (1 / self.power) + 1e-9), self.levels - 1)
        low, high = (scale * (c / self.levels) ** self.power for c in (code, code + 1))
        return high - low

    def __str__(self) -> str:
        return self.name


FP32 = Format("fp32", 8, 23, 127, 4, torch_name="float32")
# TF32 is how tensor cores read fp32 operands: fp32's exponent, fp16's fraction, still 4 bytes in memory.
TF32 = Format("tf32", 8, 10, 127, 4)
BF16 = Format("bf16", 8, 7, 127, 2, torch_name="bfloat16")
FP16 = Format("fp16", 5, 10, 15, 2, torch_name="float16")
# e4m3fn: "fn" is finite and NaN only; one code at the top, all ones, is NaN. NVIDIA, Intel, OCP.
FP8_E4M3FN = Format("fp8_e4m3fn", 4, 3, 7, 1, ieee=False, nan_codes_at_top=1, torch_name="float8_e4m3fn")
FP8_E5M2 = Format("fp8_e5m2", 5, 2, 15, 1, torch_name="float8_e5m2")
# "uz": the code of -0 is the only NaN, the bias is one higher. AMD MI300.
FP8_E4M3FNUZ = Format("fp8_e4m3fnuz", 4, 3, 8, 1, ieee=False, signed_zero=False, torch_name="float8_e4m3fnuz")
FP8_E5M2FNUZ = Format("fp8_e5m2fnuz", 5, 2, 16, 1, ieee=False, signed_zero=False, torch_name="float8_e5m2fnuz")
# No policy uses fp64. It is here so that tensors of a model or optimizer that are fp64 have a name.
FP64 = Format("fp64", 11, 52, 1023, 8, torch_name="float64")
# Blocks of 256: in trials on an H200, blocks of 128 to 256 cost half the time of blocks of 32.
BLOCK8 = BlockFormat("8bit", 8, block=256, levels=127, signed=True)
BLOCK8_UNSIGNED = BlockFormat("8bit-unsigned", 8, block=256, levels=255, signed=False)

FORMATS: dict[str, Format | BlockFormat] = {
    f.name: f
    for f in (
        FP32,
        TF32,
        BF16,
        FP16,
        FP8_E4M3FN,
        FP8_E5M2,
        FP8_E4M3FNUZ,
        FP8_E5M2FNUZ,
        BLOCK8,
        BLOCK8_UNSIGNED,
    )
}

FORMATS_16_BIT = ("bf16", "fp16")

# Torch's names of the dtypes, and its aliases: people type both.
_SPELLINGS = {f.torch_name: f.name for f in (*FORMATS.values(), FP64) if isinstance(f, Format) and f.torch_name} | {
    "half": "fp16",
    "float": "fp32",
    "double": "fp64",
}


def canonical_name(spelling: object) -> str:
    """Halfstep's name for a format as people spell it: "bf16" for `torch.bfloat16`, "BFloat16" or "bf16".

    Takes a name or a torch dtype. Case, surrounding blanks and a leading `torch.` do not matter. A name that is in no
    table is returned as is, in lower case.
    """
    key = str(spelling).strip().casefold().removeprefix("torch.")
    return _SPELLINGS.get(key, key)


def format_name(dtype: torch.dtype) -> str:
    """The short name of a torch dtype: "bf16" for `torch.bfloat16`, torch's own name where Halfstep has none ("int8")."""
    return canonical_name(dtype)


def get_format(name: str) -> Format | BlockFormat:
    """The format called `name`, in Halfstep's spelling or torch's; "fp8" is e4m3fn."""
    key = canonical_name(name)
    key = FP8_E4M3FN.name if key == "fp8" else key
    if key not in FORMATS:
        raise unknown("number format", name, FORMATS)
    return FORMATS[key]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that stores the format called `name`."""
    torch_name = getattr(get_format(name), "torch_name", None)
    if torch_name is None:
        raise SettingError(f"Format {name!r} has no torch dtype. Formats with one: {', '.join(_STORED)}.")
    dtype: torch.dtype = getattr(require_torch(f"The dtype of {name}"), torch_name)
    return dtype


_STORED = [f.name for f in FORMATS.values() if isinstance(f, Format) and f.torch_name]


def __getattr__(name: str) -> Any:
    """`COMPUTE_DTYPES` (format name -> dtype that autocast computes in) and `DTYPES_16_BIT`, which need torch.

    They are built when first used, because this module has to import without torch.
    """
    if name not in {"COMPUTE_DTYPES", "DTYPES_16_BIT"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    dtypes = {format_: torch_dtype(format_) for format_ in FORMATS_16_BIT}
    globals().update(COMPUTE_DTYPES=dtypes, DTYPES_16_BIT=tuple(dtypes.values()))
    return globals()[name]
