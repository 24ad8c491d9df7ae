"""The ledger of one traced step: which blocks were allocated and freed, in order, and their categories.

A ledger is plain data, so that it can be replayed through the model of the allocator any number of times, and so that
two ledgers of the same step at two batch sizes can be compared event by event: where both have the same events, every
size is linear in the batch size, and a third batch size needs no trace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from halfstep.errors import SettingError

__all__ = ["CATEGORIES", "OPTIONAL", "Event", "Ledger", "Line", "line_through"]

# Every category of memory, in the order in which tables show them.
CATEGORIES = {
    "weights": "the parameters, as they are stored",
    "buffers": "the model's buffers, and the copies that a skipped step restores",
    "master": "what is stored next to 16-bit weights to make them exact fp32",
    "states": "the optimizer's moments, step counts and tables",
    "average": "the EMA of the weights",
    "batch": "the batch itself",
    "gradients": "of the parameters",
    "activations": "saved by the forward pass for the backward pass",
    "cast cache": "16-bit copies of fp32 weights, cached by autocast",
    "temporaries": "what an operation needs while it runs, and gradients of activations",
    "workspaces": "scratch memory of cuBLAS, cuDNN and attention kernels",
    "transforms": "Fourier transforms of whole images by cuDNN for fp32 convolutions, if there is enough free memory",
    "rounding": "the difference between the size of a block and the size requested",
}
OPTIONAL = "transforms"  # the one category that a step can do without: torch falls back to another algorithm

_PARTS = ("persistent", "first_update", "events")


@dataclass(frozen=True)
class Event:
    """A block is allocated (`num_bytes` of memory) or, if `num_bytes` is None, freed."""

    block: int  # its number
    num_bytes: int | None
    category: str = ""
    module: str = ""
    phase: str = ""


@dataclass(frozen=True)
class Ledger:
    """The memory that stays allocated, and the events of one step."""

    persistent: tuple[Event, ...]  # allocated before the first step and never freed
    first_update: tuple[Event, ...]  # allocated by the first update and never freed
    events: tuple[Event, ...]


class Line:
    """The straight lines through two ledgers of the same step: the ledger at any batch size, and quick peaks."""

    def __init__(self, low: Ledger, low_batch: int, high: Ledger, high_batch: int) -> None:
        self._low, self._batch = low, low_batch
        slopes = [
            ((b.num_bytes or 0) - (a.num_bytes or 0)) / (high_batch - low_batch)
            for part in _PARTS
            for a, b in zip(getattr(low, part), getattr(high, part), strict=True)
        ]
        self._slopes = np.array(slopes)
        events = [e for part in _PARTS for e in getattr(low, part)]
        self._sizes = np.array([e.num_bytes or 0 for e in events], dtype=np.float64)
        # An event that frees a block subtracts the size of the event that allocated it.
        start = len(low.persistent) + len(low.first_update)
        allocated_at = {e.block: start + i for i, e in enumerate(low.events) if e.num_bytes is not None}
        self._source = np.array(
            [i if e.num_bytes is not None else allocated_at[e.block] for i, e in enumerate(events)], dtype=np.int64
        )
        needed = {allocated_at[e.block] for e in low.events if e.num_bytes is not None and e.category != OPTIONAL}
        self._sign = np.array(
            [
                0 if i >= start and source not in needed else 1 if e.num_bytes is not None else -1
                for i, (e, source) in enumerate(zip(events, self._source, strict=True))
            ]
        )

    def requested(self, batch: int) -> int:
        """The most bytes that a step must have at once, without the allocator's rounding and without what is optional."""
        return int(np.cumsum(self._at(batch)[self._source] * self._sign).max())

    def ledger(self, batch: int) -> Ledger:
        """The ledger at this batch size."""
        sizes = iter(self._at(batch).astype(np.int64).tolist())
        return Ledger(*(tuple(_resized(e, next(sizes)) for e in getattr(self._low, part)) for part in _PARTS))

    def _at(self, batch: int) -> np.ndarray:
        sizes: np.ndarray = np.maximum(0, np.rint(self._sizes + self._slopes * (batch - self._batch)))
        return sizes


def line_through(low: Ledger, low_batch: int, high: Ledger, high_batch: int) -> Line | None:
    """The line through two ledgers; None if they do not have the same events."""
    if low_batch == high_batch:
        raise SettingError(f"Both ledgers have batch size {low_batch}, and a line needs two sizes; trace another one.")
    for part in _PARTS:
        first, second = getattr(low, part), getattr(high, part)
        if len(first) != len(second) or any(_shape(a) != _shape(b) for a, b in zip(first, second, strict=True)):
            return None
    return Line(low, low_batch, high, high_batch)


def _resized(event: Event, num_bytes: int) -> Event:
    return event if event.num_bytes in {None, num_bytes} else replace(event, num_bytes=num_bytes)


def _shape(event: Event) -> tuple[int, bool, str, str]:
    return event.block, event.num_bytes is None, event.category, event.phase
