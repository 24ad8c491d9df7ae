"""Where the curves of a run are written: one protocol, which TensorBoard and the loggers of `halfstep.integrations` implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from halfstep.backends.ranks import Ranks
from halfstep.checkpoint.rng import restore_rng, rng_state

__all__ = ["Histogram", "OpenWriter", "RunInfo", "TensorBoardWriter", "Writer", "open_writers"]


@dataclass(frozen=True)
class RunInfo:
    """What a writer may know about the run that it is opened for; `run_id` stays the same when the run is resumed."""

    run_id: str
    out: Path
    policy: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Histogram:
    """Counts of the values between each pair of consecutive edges."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class Writer(Protocol):
    """Writes the numbers of a run; steps may go back, because a resumed run repeats those after its checkpoint."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write one value for each tag."""

    def histogram(self, tag: str, histogram: Histogram, step: int) -> None:
        """Write a distribution."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Write a message."""

    def close(self) -> None:
        """Write what is pending and end."""


OpenWriter = Callable[[RunInfo], Writer]


def open_writers(openers: Sequence[OpenWriter], info: RunInfo, ranks: Ranks) -> list[Writer]:
    """The writers of rank 0, none on other ranks; one that cannot be opened raises on all."""
    writers: list[Writer] = []
    if openers:
        state = rng_state()  # libraries draw names for their runs, which must not change the run
        ranks.on_main(lambda: writers.extend(opener(info) for opener in openers))
        restore_rng(state)
    return writers


class TensorBoardWriter:
    """Writes to a SummaryWriter."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """One point for each tag."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def histogram(self, tag: str, histogram: Histogram, step: int) -> None:
        """A histogram; TensorBoard needs sums over the values, so each counts as the middle of its bin."""
        edges, counts = histogram.edges, histogram.counts
        middles = [((left + right) / 2, n) for left, right, n in zip(edges, edges[1:], counts, strict=False)]
        self._writer.add_histogram_raw(
            tag,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(m * n for m, n in middles),
            sum_squares=sum(m * m * n for m, n in middles),
            # Limits are right edges; the first, empty bucket sets the left edge of the second.
            bucket_limits=list(edges),
            bucket_counts=[0, *counts],
            global_step=step,
        )

    def text(self, tag: str, text: str, step: int) -> None:
        """A message, indented so that Markdown keeps the columns of a table."""
        self._writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def close(self) -> None:
        """Write everything and close the file."""
        self._writer.close()
