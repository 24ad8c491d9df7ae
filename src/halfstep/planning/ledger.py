"""The ledger of one traced step: which blocks were taken and given back, in order, and for what.

A ledger is plain data, so that it can be replayed through the allocator's model any number of times, and so that two
ledgers of the same step at two batch sizes can be compared line by line: where they have the same lines, every size is
a straight line in the batch size, and a third batch size needs no trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halfstep.errors import SettingError

__all__ = ["CAUSES", "OPTIONAL", "Entry", "Ledger", "Line", "line_through"]

# Every cause a byte can have, in the order in which tables show them.
CAUSES = {
    "weights": "the parameters, as they are stored",
    "buffers": "the model's buffers, and the copies a skipped step is undone with",
    "master": "what is held beside 16-bit weights to make them exact fp32",
    "states": "the optimizer's moments, step counts and tables",
    "average": "the moving average of the weights",
    "batch": "the batch itself",
    "gradients": "of the parameters",
    "activations": "kept by the forward pass for the backward pass",
    "cast cache": "16-bit copies of fp32 weights, kept by autocast",
    "temporaries": "what an operation needs while it runs, and gradients of activations",
    "workspaces": "scratch memory of cuBLAS, cuDNN and attention kernels",
    "transforms": "whole images transformed by cuDNN for fp32 convolutions, where there is room for that",
    "rounding": "blocks larger than what was asked for",
}


OPTIONAL = "transforms"  # the cause that a step can do without: torch takes another algorithm where there is no room

_PARTS = ("held", "made", "lines")


@dataclass(frozen=True)
class Entry:
    """One line: a block is taken (`num_bytes` of them) or, if `num_bytes` is None, given back."""

    block: int  # its number
    num_bytes: int | None
    cause: str = ""
    module: str = ""
    phase: str = ""


@dataclass(frozen=True)
class Ledger:
    """What one process holds throughout, and the lines of one step."""

    held: tuple[Entry, ...]  # taken before the first step and never given back
    made: tuple[Entry, ...]  # taken by the first step's update and never given back
    lines: tuple[Entry, ...]


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
        entries = [e for part in _PARTS for e in getattr(low, part)]
        self._sizes = np.array([e.num_bytes or 0 for e in entries], dtype=np.float64)
        # A line that gives a block back takes off the size of the line that took it.
        start = len(low.held) + len(low.made)
        takes = {e.block: start + i for i, e in enumerate(low.lines) if e.num_bytes is not None}
        self._source = np.array(
            [i if e.num_bytes is not None else takes[e.block] for i, e in enumerate(entries)], dtype=np.int64
        )
        needed = {takes[e.block] for e in low.lines if e.num_bytes is not None and e.cause != OPTIONAL}
        self._sign = np.array(
            [
                0 if i >= start and source not in needed else 1 if e.num_bytes is not None else -1
                for i, (e, source) in enumerate(zip(entries, self._source, strict=True))
            ]
        )

    def requested(self, batch: int) -> int:
        """The most bytes that a step must have at once, without the allocator's rounding and without what is optional."""
        return int(np.cumsum(self._at(batch)[self._source] * self._sign).max())

    def ledger(self, batch: int) -> Ledger:
        """The ledger at this batch size."""
        sizes = self._at(batch).astype(np.int64).tolist()
        parts, place = [], 0
        for part in _PARTS:
            entries: tuple[Entry, ...] = getattr(self._low, part)
            here = sizes[place : place + len(entries)]
            place += len(entries)
            parts.append(
                tuple(
                    e
                    if e.num_bytes is None or e.num_bytes == size
                    else Entry(e.block, size, e.cause, e.module, e.phase)
                    for e, size in zip(entries, here, strict=True)
                )
            )
        return Ledger(*parts)

    def _at(self, batch: int) -> np.ndarray:
        sizes: np.ndarray = np.maximum(0, np.rint(self._sizes + self._slopes * (batch - self._batch)))
        return sizes


def line_through(low: Ledger, low_batch: int, high: Ledger, high_batch: int) -> Line | None:
    """The line through two ledgers; None if they are not the same step line by line."""
    if low_batch == high_batch:
        raise SettingError(f"Two ledgers at the same batch size ({low_batch}) make no line; trace another size.")
    for part in _PARTS:
        first, second = getattr(low, part), getattr(high, part)
        if len(first) != len(second) or any(_shape(a) != _shape(b) for a, b in zip(first, second, strict=True)):
            return None
    return Line(low, low_batch, high, high_batch)


def _shape(entry: Entry) -> tuple[int, bool, str, str]:
    return entry.block, entry.num_bytes is None, entry.cause, entry.phase
