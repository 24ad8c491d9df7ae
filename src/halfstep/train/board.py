"""What a run shows in TensorBoard and other loggers: the numbers of its run file, as scalars and histograms.

    train/      loss, lr, scale, skips
    val/        the validation
    numerics/   of the samples of the Watch: the largest share of a gradient that the format of the run flushes to zero, elements
                that are not finite, the largest share of updates lost to rounding
    updates/    the norm of an update relative to the weights, the median over the parameters of a kind: weight, bias, ...
    flushed/    of the worst gradients, the share that is flushed to zero
    exponents/  of the worst gradients, a histogram of log2 |x|: one bar is a power of two
    events/     how many there were so far, by kind; and as texts, their messages

A tensor that was once among the worst keeps its curve, so that curves have no gaps; there are at most 16 of them. A writer that
fails is dropped with a warning: the run file has everything, and the run continues.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from halfstep.events import log_warning
from halfstep.kernels.exponents import BIN_OF_1
from halfstep.precision.formats import Format
from halfstep.train.writer import Histogram, TensorBoardWriter, Writer
from halfstep.watching.events import Event
from halfstep.watching.sample import Sample
from halfstep.watching.stats import TensorStats

__all__ = ["Board", "NoBoard", "open_board"]

_NUM_WORST = 3  # at each sample
_MOST_NAMED = 16
_MOST_KINDS = 8


class NoBoard:
    """There is nothing to write to: TensorBoard is not installed, and no logger was asked for."""

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Ignore it."""

    def sample(self, sample: Sample, fmt: Format | None) -> None:
        """Ignore it."""

    def event(self, event: Event) -> None:
        """Ignore it."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Ignore it."""

    def close(self) -> None:
        """Nothing to close."""


class Board(NoBoard):
    """Writes to one or more writers."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = list(writers)
        self._named: dict[str, None] = {}
        self._events: Counter[str] = Counter()

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Write one value each."""
        tagged = {f"{group}/{name}": value for name, value in values.items()}
        if tagged:
            self._each(lambda writer: writer.scalars(tagged, step))

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
        """Count an event, and write its message."""
        self._events[event.kind] += 1
        self.scalars("events", {event.kind: self._events[event.kind]}, event.step)
        self.text(f"events/{event.kind}", str(event), event.step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Write a message."""
        self._each(lambda writer: writer.text(tag, text, step))

    def close(self) -> None:
        """Write everything and close."""
        self._each(lambda writer: writer.close())

    def _each(self, write: Callable[[Writer], None]) -> None:
        for writer in tuple(self._writers):
            try:
                write(writer)
            except Exception as error:  # of any library: a full disk, a server that does not answer
                self._writers.remove(writer)
                log_warning(
                    f"{type(writer).__name__} failed: {type(error).__name__}: {error} It gets no further values; the run continues, and "
                    "its run file has everything."
                )

    def _exponents(self, tag: str, stats: TensorStats, step: int) -> None:
        """A histogram of log2 |x| of the elements that are finite and not 0."""
        counts = {i - BIN_OF_1: count for i, count in enumerate(stats.bins) if count}
        if not counts:
            return
        low, high = min(counts), max(counts)
        edges = tuple(float(e) for e in range(low, high + 2))
        histogram = Histogram(edges, tuple(counts.get(e, 0) for e in range(low, high + 1)))
        self._each(lambda writer: writer.histogram(tag, histogram, step))


def _ratios(sample: Sample) -> dict[str, float]:
    """The median of the update-to-weight ratios by the last part of the parameters' names."""
    kinds: dict[str, list[float]] = {}
    for name, update in sample.updates.items():
        if not math.isnan(update.ratio):  # of weights that are 0
            kinds.setdefault(name.rpartition(".")[2], []).append(update.ratio)
    common = sorted(kinds, key=lambda kind: len(kinds[kind]), reverse=True)[:_MOST_KINDS]
    return {kind: statistics.median(kinds[kind]) for kind in common}


def open_board(folder: Path | None, writers: Sequence[Writer] = ()) -> NoBoard:
    """A board for TensorBoard in `folder`, if it is installed, and for `writers`."""
    writers = list(writers)
    if folder is not None:
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            writers.append(TensorBoardWriter(SummaryWriter(str(folder))))
    return Board(writers) if writers else NoBoard()
