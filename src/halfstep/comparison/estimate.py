"""Numbers with their uncertainty: medians, intervals, paired ratios, and how far two loss curves are apart.

How it works. Rows take turns (see `conductor`), so that slice i of repeat r of one row ran next to slice i of repeat r of
every other row. A ratio of two rows is formed within each such pair, where both saw the same machine, and only then are
the ratios put together: a neighbour that slows the machine down for half the comparison slows both halves of a pair, and
the ratio stays what it was. The figure is the median of the ratios.

Its interval is the wider of two. One is a two-level bootstrap: repeats are drawn with replacement, then slices within
them, 2,000 times, and the middle 95 % of the medians are kept. Of two or three repeats a bootstrap is too sure of itself:
where processes differ by as much as turns do (3 repeats of 12 turns, 2 % each) it held the true ratio in 86 % of simulated
comparisons, and where they differ by more, in 71 %. So the other is Student's t interval of the repeats' own medians, on
a logarithmic scale, because times and ratios are positive. Together they held it in 95 % or more. With one repeat only
slices can be drawn, so the interval then knows nothing of what differs between processes; `count` says how many repeats
an estimate rests on.

Losses are compared seed by seed, and their mean carries Student's t interval too.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Estimate", "curve_distance", "from_groups", "from_values", "paired_ratio", "smooth"]

CONFIDENCE = 0.95
_RESAMPLES = 2000
# Two-sided 95 % points of Student's t by degrees of freedom; 1.96 beyond.
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)

Groups = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Estimate:
    """A value, the interval it lies in with 95 % confidence, and the number of repeats behind it."""

    value: float
    low: float
    high: float
    count: int

    def excludes(self, other: float) -> bool:
        """Whether the interval leaves this number out; with no interval (one value) nothing is excluded."""
        return self.low < self.high and not self.low <= other <= self.high

    def over(self, whole: float) -> Estimate:
        """`whole` divided by this, e.g. samples per second from seconds."""
        return Estimate(whole / self.value, whole / self.high, whole / self.low, self.count)


def from_groups(groups: Groups) -> Estimate | None:
    """The median over all values of all repeats (times or ratios, above 0), with its interval."""
    kept = [list(group) for group in groups if group]
    if not kept:
        return None
    value = statistics.median(itertools.chain.from_iterable(kept))
    low, high = _bootstrap(kept, statistics.median)
    repeats = from_values([math.log(statistics.median(group)) for group in kept])
    assert repeats is not None
    if repeats.count > 1:
        low, high = min(low, math.exp(repeats.low)), max(high, math.exp(repeats.high))
    return Estimate(value, min(low, value), max(high, value), len(kept))


def paired_ratio(above: Groups, below: Groups) -> Estimate | None:
    """The median ratio above/below, each formed within one slice of one repeat."""
    ratios = [
        [a / b for a, b in zip(upper, lower, strict=False) if a > 0 and b > 0]
        for upper, lower in zip(above, below, strict=False)
        if upper and lower
    ]
    return from_groups(ratios)


def from_values(values: Sequence[float]) -> Estimate | None:
    """The mean of one value per seed, with Student's t interval; without a second value there is no interval."""
    kept = [value for value in values if math.isfinite(value)]
    if not kept:
        return None
    mean = statistics.fmean(kept)
    if len(kept) == 1:
        return Estimate(mean, mean, mean, 1)
    t = _T[len(kept) - 2] if len(kept) - 2 < len(_T) else 1.96
    half = t * statistics.stdev(kept) / math.sqrt(len(kept))
    return Estimate(mean, mean - half, mean + half, len(kept))


def smooth(curve: Sequence[float], width: int | None = None) -> list[float]:
    """Means of neighbouring steps (a twentieth of the curve), so that what is left is the course and not the batch."""
    width = width or max(1, len(curve) // 20)
    return [statistics.fmean(curve[i : i + width]) for i in range(0, len(curve) - width + 1, width)]


def curve_distance(one: Sequence[float], other: Sequence[float]) -> float | None:
    """The mean distance of two loss curves, smoothed; None where they share no step, or one is not finite."""
    length = min(len(one), len(other))
    if not length or not all(map(math.isfinite, itertools.chain(one[:length], other[:length]))):
        return None
    pairs = zip(smooth(one[:length]), smooth(other[:length]), strict=True)
    return statistics.fmean(abs(a - b) for a, b in pairs)


def _bootstrap(groups: Groups, statistic: Callable[[list[float]], float]) -> tuple[float, float]:
    chance = random.Random(0)  # noqa: S311 - fixed, so that a report rebuilt from its files is the same report
    found = []
    for _ in range(_RESAMPLES):
        drawn: list[float] = []
        for group in chance.choices(groups, k=len(groups)):
            drawn += chance.choices(group, k=len(group))
        found.append(statistic(drawn))
    found.sort()
    tail = round(len(found) * (1 - CONFIDENCE) / 2)
    return found[tail], found[-1 - tail]
