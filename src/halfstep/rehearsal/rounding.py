"""The relative error of a tensor in a format, estimated from the exponents of its elements.

With n elements in 2^e <= |x| < 2^(e + 1), spread evenly in log2 as measured values are, multiplied by a scale 2^k first:

    their sum of squares    n * 4^e * 3 / (2 ln 2)
    error of a normal       n * ulp^2 / 12, with ulp = 2^(e - fraction bits)
    error of a subnormal    the same with the constant ulp of subnormals
    below half of that ulp  the whole value is lost
    in between              the value is rounded up to the smallest subnormal

The square root of the ratio is the relative L2 error: the share of the gradient's length that is lost. In the normal range it is
2^-12.3 for fp16, whatever the scale; so a scale matters only for what lies below that range, and the best one is
a plateau. `best_scale` minimises the root mean square over tensors, each with the same weight: Adam normalises each element, and a sum over all of them would
only describe the layer with the largest gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halfstep.kernels.exponents import BIN_OF_1, NUM_BINS
from halfstep.precision.formats import Format
from halfstep.watching.stats import TensorStats

__all__ = ["SENTINEL", "BestScale", "best_scale", "largest_magnitude", "relative_error"]

SENTINEL = 126  # exponents from here on are masks (torch.finfo.min, in whatever dtype the model computes), not values
_SQUARE = 3 / (2 * math.log(2))  # mean of x^2 over [1, 2), evenly in log2
_LN2 = math.log(2)
# Mean of (1 - x/2)^2 * 4 over [1, 2), evenly in log2: the square of the distance from x to 2.
_ROUNDED_UP = 4 - 4 / _LN2 + _SQUARE
_EXPONENTS = np.arange(NUM_BINS) - BIN_OF_1
_SCALES = range(-24, 101)  # powers of two that are considered
_NEARLY = 1.005  # an error within 0.5 % of the best is as good
_HEADROOM = 2  # powers of two below the largest scale that does not overflow


def largest_magnitude(stats: TensorStats) -> float:
    """The largest magnitude that is a value, not the sentinel of a mask."""
    if stats.largest < 2.0**SENTINEL:
        return stats.largest
    values = [e for e, count in zip(_EXPONENTS[:-1].tolist(), stats.bins[:-1], strict=True) if count]
    return math.ldexp(1.0, values[-1] + 1) if values else 0.0


def relative_error(bins: Sequence[int] | np.ndarray, fmt: Format, scale_exponent: int = 0) -> float:
    """The relative L2 error of elements, counted by exponent, that are rounded to `fmt` after a multiplication by 2^k."""
    return float(_errors(np.asarray([bins], dtype=np.float64), fmt, np.array([scale_exponent]))[0, 0])


def _errors(bins: np.ndarray, fmt: Format, scale_exponents: np.ndarray) -> np.ndarray:
    """The relative L2 errors of tensors (rows) at scales (columns)."""
    counts = bins[:, :-1]  # the last bin has what is beyond 2^63: masks, or an overflow in any case
    e = _EXPONENTS[:-1].astype(np.float64)
    top = np.where(counts > 0, e, e[0]).max(axis=1, keepdims=True)
    squares = counts * np.exp2(2 * np.minimum(e - top, 0))  # relative to the largest bin, so that nothing overflows
    weights = squares / np.maximum(squares.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    scaled = e[:, None] + scale_exponents[None, :]
    smallest = 1 - fmt.bias - fmt.fraction_bits  # exponent of the smallest subnormal
    ulp = np.maximum(scaled, 1 - fmt.bias) - fmt.fraction_bits
    share = np.exp2(2 * np.minimum(ulp - scaled, 1)) / 12  # of the square of 2^e
    share = np.where(scaled == smallest - 1, _ROUNDED_UP, share)
    share = np.where(scaled < smallest - 1, _SQUARE, share)
    errors: np.ndarray = np.sqrt(weights @ (share / _SQUARE))
    return errors


@dataclass(frozen=True)
class BestScale:
    """A loss scale with its predicted error."""

    exponent: int  # the scale is 2^exponent
    error: float  # root mean square over tensors of the relative L2 error
    least_error: float  # of any scale
    highest: int  # exponent of the largest scale at which nothing overflows

    @property
    def scale(self) -> float:
        """The loss scale."""
        return math.ldexp(1.0, self.exponent)


def best_scale(tensors: Sequence[TensorStats], fmt: Format, limit: float = math.inf) -> BestScale:
    """The loss scale with the least error at which no element overflows.

    Usually many powers of two are equally good: the middle one leaves room for gradients that shrink or grow. Two powers of two below
    the first overflow are left free, even if that costs some error.

    `limit` is the largest magnitude among gradients in fp32, which the scale must not take beyond the range of fp32.
    """
    tensors = [t for t in tensors if t.nonzero]
    largest = max((largest_magnitude(t) for t in tensors), default=0.0)
    wide = limit if math.isfinite(limit) and limit > 0 else largest
    allowed = [
        k for k in _SCALES if math.ldexp(largest, k) <= fmt.max and (not wide or math.log2(wide) + k < SENTINEL)
    ] or [_SCALES[0]]
    each = _errors(np.array([t.bins for t in tensors], dtype=np.float64).reshape(-1, NUM_BINS), fmt, np.array(allowed))
    means = np.sqrt(np.square(each).mean(axis=0)) if tensors else np.zeros(len(allowed))
    errors = dict(zip(allowed, means.tolist(), strict=True))
    least = min(errors.values())
    highest = allowed[-1]
    top = max(highest - _HEADROOM, allowed[0])
    lowest = min(k for k, error in errors.items() if error <= least * _NEARLY)
    best = top if lowest >= top else (lowest + top + 1) // 2
    return BestScale(best, errors[best], least, highest)
