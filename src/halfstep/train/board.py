"""What a run shows in TensorBoard: the numbers of its run file, as scalars and histograms.

    train/      loss, lr, scale, skips
    val/        the validation
    numerics/   of the samples of the Watch: the largest share of a gradient that the format of the run flushes to zero, elements
                that are not finite, the largest share of updates lost to rounding
    updates/    the norm of an update relative to the weights, the median over the parameters of a kind: weight, bias, ...
    flushed/    of the worst gradients, the share that is flushed to zero
    exponents/  of the worst gradients, a histogram of log2 |x|: one bar is a power of two
    events/     how many there were so far, by kind

A tensor that was once among the worst keeps its curve, so that curves have no gaps; there are at most 16 of them.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.kernels.exponents import BIN_OF_1
from halfstep.precision.formats import Format
from halfstep.watching.events import Event
from halfstep.watching.sample import Sample
from halfstep.watching.stats import TensorStats

__all__ = ["Board", "NoBoard", "open_board"]

_NUM_WORST = 3  # at each sample
_MOST_NAMED = 16
_MOST_KINDS = 8


class NoBoard:
    """TensorBoard is not installed, or not wanted."""

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Ignore it."""

    def sample(self, sample: Sample, fmt: Format | None) -> None:
        """Ignore it."""

    def event(self, event: Event) -> None:
        """Ignore it."""

    def close(self) -> None:
        """Nothing to close."""


class Board(NoBoard):
    """Writes to a SummaryWriter."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._named: dict[str, None] = {}
        self._events: Counter[str] = Counter()

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Write one value each."""
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def sample(self, sample: Sample, fmt: Format | None) -> None:
        """Write a sample; shares are those of `fmt`, and left out without one."""
        step = sample.step
        lost = [update.lost for update in sample.updates.values()]
        numerics = {"lost updates": max(lost, default=0.0)}
        for group in ("gradient", "weight", "activation"):
            rows = getattr(sample, f"{group}_rows")
            if len(rows):
                numerics[f"non-finite {group}s"] = float(rows.nonfinite.sum())
        if fmt is not None and len(sample.gradient_rows):
            flushed = dict(zip(sample.gradient_rows.names, sample.gradient_rows.flushed(fmt).tolist(), strict=True))
            numerics["flushed to zero"] = max(flushed.values())
            worst = sorted(flushed, key=flushed.__getitem__, reverse=True)[:_NUM_WORST]
            self._named |= dict.fromkeys(worst[: _MOST_NAMED - len(self._named)])
            self.scalars("flushed", {name: flushed[name] for name in self._named if name in flushed}, step)
            for name in worst:
                self._exponents(f"exponents/{name}", sample.gradients[name], step)
        self.scalars("numerics", numerics, step)
        self.scalars("updates", _ratios(sample), step)

    def event(self, event: Event) -> None:
        """Count an event."""
        self._events[event.kind] += 1
        self.scalars("events", {event.kind: self._events[event.kind]}, event.step)

    def close(self) -> None:
        """Write everything and close the file."""
        self._writer.close()

    def _exponents(self, tag: str, stats: TensorStats, step: int) -> None:
        """A histogram of log2 |x| of the elements that are finite and not 0; the writer takes sums over values, so bins count by their middle."""
        counts = {i - BIN_OF_1: count for i, count in enumerate(stats.bins) if count}
        if not counts:
            return
        low, high = min(counts), max(counts)
        middles = [(e + 0.5, count) for e, count in counts.items()]
        self._writer.add_histogram_raw(
            tag,
            min=float(low),
            max=float(high + 1),
            num=sum(counts.values()),
            sum=sum(m * n for m, n in middles),
            sum_squares=sum(m * m * n for m, n in middles),
            # Limits are right edges; the first, empty bucket sets the left edge of the second.
            bucket_limits=[float(e) for e in range(low, high + 2)],
            bucket_counts=[0, *(counts.get(e, 0) for e in range(low, high + 1))],
            global_step=step,
        )


def _ratios(sample: Sample) -> dict[str, float]:
    """The median of the update-to-weight ratios by the last part of the parameters' names."""
    kinds: dict[str, list[float]] = {}
    for name, update in sample.updates.items():
        if not math.isnan(update.ratio):  # of weights that are 0
            kinds.setdefault(name.rpartition(".")[2], []).append(update.ratio)
    common = sorted(kinds, key=lambda kind: len(kinds[kind]), reverse=True)[:_MOST_KINDS]
    return {kind: statistics.median(kinds[kind]) for kind in common}


def open_board(folder: Path | None) -> NoBoard:
    """A board that writes to `folder`, if TensorBoard is installed."""
    if folder is not None:
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            return Board(SummaryWriter(str(folder)))
    return NoBoard()
