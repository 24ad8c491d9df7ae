"""What the counted exponents of a tensor mean in a number format, on the host.

`kernels/exponents.py` counts on the device how many elements of each tensor lie in each power of two. From that follows, for any
format and after the fact, which share of the elements the format can represent: those below half of its smallest subnormal round
to zero (flushed), those below its smallest normal number lose bits (subnormal), those above its largest number become inf or
saturate (beyond). Limits that are powers of two are exact; the upper limit is exact to the bin, so that `beyond` never counts
an element that fits.

A sample of a model has hundreds of tensors, and turning each row into Python objects would cost more time than counting did. So a
`StatsTable` keeps the rows as they arrived and answers for all tensors at once; it builds a `TensorStats` when asked for one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halfstep.errors import SettingError
from halfstep.hardware.units import count_text
from halfstep.kernels.exponents import BIN_OF_1, INF, LARGEST, NAN, NUM_BINS, SMALLEST, ZEROS
from halfstep.precision.formats import Format, get_format

__all__ = ["StatsTable", "TensorStats"]

_LOWEST, _HIGHEST = -BIN_OF_1, NUM_BINS - 1 - BIN_OF_1  # exponents of the outer bins, which include everything beyond


@dataclass(frozen=True)
class TensorStats:
    """Magnitudes of the elements of one tensor, or of the tensors of a module. Magnitudes are divided by the loss scale."""

    name: str
    numel: int
    nan: int
    inf: int
    zeros: int
    largest: float  # finite; 0 if there is no finite element other than 0
    smallest: float  # non-zero; likewise
    bins: tuple[int, ...]  # of the other elements, by exponent: bins[e + BIN_OF_1] in 2^e <= |x| < 2^(e + 1)

    @property
    def nonfinite(self) -> int:
        """Number of NaN and infinite elements."""
        return self.nan + self.inf

    @property
    def nonzero(self) -> int:
        """Number of finite elements other than 0: what the shares by format refer to."""
        return self.numel - self.nonfinite - self.zeros

    @property
    def share_of_zeros(self) -> float:
        """Zeros among all elements."""
        return self.zeros / self.numel if self.numel else 0.0

    def flushed(self, fmt: str | Format) -> float:
        """Share of the non-zero elements that a cast to `fmt` would turn into 0."""
        return self._share(_LOWEST, _limits(fmt)[0])

    def subnormal(self, fmt: str | Format) -> float:
        """Share of the non-zero elements that `fmt` would represent as subnormals, with fewer bits."""
        return self._share(*_limits(fmt)[:2])

    def beyond(self, fmt: str | Format) -> float:
        """Share of the non-zero elements at or above the first power of two that `fmt` cannot represent."""
        return self._share(_limits(fmt)[2], _HIGHEST + 1)

    def percentile(self, q: float) -> int | None:
        """The smallest exponent e so that `q` percent of the non-zero elements are below 2^(e + 1); None if all are 0."""
        if not 0 <= q <= 100:
            raise SettingError(f"percentile({q}) is not between 0 and 100.")
        cumulative = np.cumsum(self.bins)
        if not cumulative[-1]:
            return None
        needed = max(1, math.ceil(cumulative[-1] * q / 100))
        return int(np.searchsorted(cumulative, needed)) - BIN_OF_1

    def _share(self, low: int, high: int) -> float:
        count = sum(self.bins[low + BIN_OF_1 : high + BIN_OF_1])
        return count / self.nonzero if count else 0.0

    @classmethod
    def merge(cls, name: str, parts: Iterable[TensorStats]) -> TensorStats:
        """The statistics of several tensors as one, for a module from its parameters."""
        parts = list(parts)
        smallest = [part.smallest for part in parts if part.smallest > 0]
        bins = np.zeros(NUM_BINS, dtype=np.int64)
        for part in parts:
            bins += part.bins
        return cls(
            name,
            numel=sum(part.numel for part in parts),
            nan=sum(part.nan for part in parts),
            inf=sum(part.inf for part in parts),
            zeros=sum(part.zeros for part in parts),
            largest=max((part.largest for part in parts), default=0.0),
            smallest=min(smallest, default=0.0),
            bins=tuple(bins.tolist()),
        )

    def to_record(self) -> dict[str, Any]:
        """The statistics as JSON types for the run file; `exponents` maps those that occur to their counts."""
        exponents = {str(i - BIN_OF_1): count for i, count in enumerate(self.bins) if count}
        names = ("name", "numel", "nan", "inf", "zeros", "largest", "smallest")
        return {name: getattr(self, name) for name in names} | {"exponents": exponents}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> TensorStats:
        """The statistics that `to_record` wrote."""
        values = dict(record)
        bins = [0] * NUM_BINS
        for exponent, count in values.pop("exponents").items():
            bins[int(exponent) + BIN_OF_1] = count
        return cls(**values, bins=tuple(bins))

    def __str__(self) -> str:
        parts = [f"{self.numel:,} elements"]
        if self.nonzero:
            parts.append(f"{self.smallest:.3g} to {self.largest:.3g}, median 2^{self.percentile(50)}")
        parts += [f"{count:,} {label}" for count, label in ((self.nan, "NaN"), (self.inf, "inf")) if count]
        parts += [count_text(self.zeros, "zero")] if self.zeros else []
        return f"{self.name}: {', '.join(parts)}"


@dataclass(frozen=True, eq=False)
class StatsTable:
    """Statistics of many tensors, one row each, as they came from the device; arrays have one element per tensor."""

    names: Sequence[str]
    numels: np.ndarray  # int64
    table: np.ndarray  # int64, the columns of `Counts.table`
    divisor: float = 1.0  # what the elements were divided by

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[TensorStats]:
        return (self.row(i) for i in range(len(self)))

    def __getitem__(self, name: str) -> TensorStats:
        return self.row(list(self.names).index(name))

    def row(self, index: int) -> TensorStats:
        """The statistics of one tensor."""
        row = self.table[index]
        return TensorStats(
            self.names[index],
            int(self.numels[index]),
            nan=int(row[NAN]),
            inf=int(row[INF]),
            zeros=int(row[ZEROS]),
            largest=float(self.largest[index]),
            smallest=float(self.smallest[index]),
            bins=tuple(row[:NUM_BINS].tolist()),
        )

    @property
    def nonfinite(self) -> np.ndarray:
        """Number of NaN and infinite elements."""
        count: np.ndarray = self.table[:, NAN] + self.table[:, INF]
        return count

    @property
    def nonzero(self) -> np.ndarray:
        """Number of finite elements other than 0."""
        count: np.ndarray = self.numels - self.nonfinite - self.table[:, ZEROS]
        return count

    @property
    def share_of_zeros(self) -> np.ndarray:
        """Zeros among all elements."""
        return _ratio(self.table[:, ZEROS], self.numels)

    @property
    def largest(self) -> np.ndarray:
        """Largest finite magnitude; 0 if there is none."""
        return self._magnitude(self.table[:, LARGEST])

    @property
    def smallest(self) -> np.ndarray:
        """Smallest non-zero magnitude; 0 if there is none."""
        complement = self.table[:, SMALLEST]
        return self._magnitude(np.where(complement > 0, (1 << 32) - complement, 0))

    def flushed(self, fmt: str | Format) -> np.ndarray:
        """Share of the non-zero elements that a cast to `fmt` would turn into 0."""
        return self._shares(_LOWEST, _limits(fmt)[0])

    def subnormal(self, fmt: str | Format) -> np.ndarray:
        """Share of the non-zero elements that `fmt` would represent as subnormals, with fewer bits."""
        return self._shares(*_limits(fmt)[:2])

    def beyond(self, fmt: str | Format) -> np.ndarray:
        """Share of the non-zero elements at or above the first power of two that `fmt` cannot represent."""
        return self._shares(_limits(fmt)[2], _HIGHEST + 1)

    def _shares(self, low: int, high: int) -> np.ndarray:
        return _ratio(self.table[:, low + BIN_OF_1 : high + BIN_OF_1].sum(axis=1), self.nonzero)

    def _magnitude(self, bits: np.ndarray) -> np.ndarray:
        magnitude: np.ndarray = bits.astype(np.int32).view(np.float32).astype(np.float64) / self.divisor
        return magnitude


def _limits(fmt: str | Format) -> tuple[int, int, int]:
    """Exponents from which a format does not flush, is normal, and overflows."""
    fmt_ = get_format(fmt) if isinstance(fmt, str) else fmt
    if not isinstance(fmt_, Format) or 1 - fmt_.bias < _LOWEST:
        raise SettingError(
            f"Shares of elements are not known for the format {fmt_}. Use fp32, bf16, fp16, tf32 or an fp8."
        )
    # Half of the smallest subnormal itself rounds to 0 too (ties to even); a single value, counted as representable.
    flush, normal = 0 - fmt_.bias - fmt_.fraction_bits, 1 - fmt_.bias
    overflow = math.frexp(fmt_.max)[1]
    return flush, normal, min(overflow, _HIGHEST + 1)


def _ratio(part: np.ndarray, total: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = part / np.maximum(total, 1)
    return ratio
