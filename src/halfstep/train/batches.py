"""Which batches a step was computed from, so that the batch behind a loss can be looked at.

A batch is identified by its epoch and its index in the loader, from 0; by the indices of its samples in the dataset, where its
loader determines them (`train.order`); and by a short hash of what the loader returned. Nothing of that is computed unless
somebody asks, so the batches themselves are stored: those of the last three steps. On a GPU a loss arrives during the next
step as a rule, and at the latest during the one after it, which waits for work that was launched after the loss. The batches
are the loader's own objects, on the host as a rule, and nothing is copied for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from halfstep.train.order import SampleOrder
from halfstep.train.stream import DataStream, fingerprint

__all__ = ["BatchId", "BatchIds", "StepBatches", "WindowBatches"]

HASH_DIGITS = 12
_MOST_STEPS = 3  # whose batches are stored


@dataclass(frozen=True)
class BatchId:
    """One batch of a run."""

    epoch: int
    index: int  # of the batch in its epoch, from 0
    hash: str | None  # the start of `fingerprint(batch)`; None if the batch is gone
    samples: tuple[int, ...] | None  # indices in the dataset; None if the loader does not determine them

    def as_data(self) -> dict[str, Any]:
        """Plain values."""
        values: dict[str, Any] = {"epoch": self.epoch, "index": self.index, "hash": self.hash}
        return values if self.samples is None else values | {"samples": list(self.samples)}

    def __str__(self) -> str:
        digits = "" if self.hash is None else f", hash {self.hash}"
        return f"batch {self.index} of epoch {self.epoch}{digits}"


@dataclass(frozen=True)
class BatchIds:
    """The batches of one step: several under accumulation."""

    batches: tuple[BatchId, ...]

    def as_data(self) -> list[dict[str, Any]]:
        """Plain values."""
        return [batch.as_data() for batch in self.batches]

    def __str__(self) -> str:
        return "; ".join(map(str, self.batches))


class StepBatches:
    """The batches of one step, until its loss has arrived."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, SampleOrder | None]] = []
        self._batches: list[Any] = []

    def add(self, data: DataStream, batch: Any) -> None:
        """Add the batch that `data` has just returned."""
        self._entries.append((data.epoch, data.batch - 1, data.order))
        self._batches.append(batch)

    def drop(self) -> None:
        """Forget the contents of the batches."""
        self._batches = [None] * len(self._entries)

    def identify(self) -> BatchIds:
        """Identify the batches: hashes them, and draws the order of the epoch again."""
        return BatchIds(
            tuple(
                BatchId(
                    epoch,
                    index,
                    None if batch is None else fingerprint(batch)[:HASH_DIGITS],
                    None if order is None else order.samples(index),
                )
                for (epoch, index, order), batch in zip(self._entries, self._batches, strict=True)
            )
        )


class WindowBatches:
    """Collects the batches of the window in progress, and limits how many steps' batches are stored.

    Without `active`, which is for runs that nobody watches, there are none.
    """

    def __init__(self, *, active: bool = True) -> None:
        self._active = active
        self._window = StepBatches()
        self._stored: deque[StepBatches] = deque()

    def add(self, data: DataStream, batch: Any) -> None:
        """Add the batch that `data` has just returned to the window."""
        if self._active:
            self._window.add(data, batch)

    def end_window(self) -> StepBatches:
        """The batches of the step that ends; those of older steps are dropped."""
        window, self._window = self._window, StepBatches()
        self._stored.append(window)
        while len(self._stored) > _MOST_STEPS:
            self._stored.popleft().drop()
        return window
