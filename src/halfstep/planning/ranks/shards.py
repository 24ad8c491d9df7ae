"""The bytes that one rank stores of a model's weights, gradients, masters and optimizer states, to the byte.

FSDP2 divides dimension 0 of every parameter as `torch.chunk` does: each rank gets ceil(rows / N) rows until none are left,
so the last ranks may have fewer, or none. Weights and gradients are stored padded to the size of the first rank's shard on
every rank, because the collectives exchange equal parts; masters and states have the rows that the rank really has. Rank 0
always has the most, so it decides whether a plan fits. tests/planning/ranks compares these numbers with real ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["PADDED", "Part", "count_parts", "fsdp_bytes", "local_rows", "whole_bytes"]

PADDED = frozenset({"weights", "gradients"})  # stored with as many rows on every rank as on rank 0


@dataclass(frozen=True)
class Part:
    """Storage with one entry for each element of a parameter, or for each block of its elements."""

    category: str  # weights, gradients, master, states or average
    shape: tuple[int, ...]  # of the parameter
    block_bytes: int
    block: int = 1  # elements that share an entry: 256 for the scales of 8-bit moments
    at_root: bool = False  # of a weight: outside the units of `Job.shard`, so gathered by the root of FSDP2

    @property
    def num_rows(self) -> int:
        """The size of the dimension that is sharded."""
        return self.shape[0] if self.shape else 1

    def num_bytes(self, rows: int) -> int:
        """Bytes of this many rows."""
        return -(-rows * math.prod(self.shape[1:]) // self.block) * self.block_bytes


Counted = tuple[tuple[Part, int], ...]  # equal parts are stored once, with their number: a model has hundreds


def count_parts(parts: Iterable[Part]) -> Counted:
    """Equal parts with their number."""
    return tuple(Counter(parts).items())


def local_rows(num_rows: int, num_ranks: int, rank: int) -> int:
    """The rows of a rank's chunk."""
    chunk = -(-num_rows // num_ranks)
    return max(0, min(chunk, num_rows - rank * chunk))


def whole_bytes(parts: Counted) -> dict[str, int]:
    """Bytes by category where nothing is sharded."""
    return _sum(parts, lambda part: part.num_bytes(part.num_rows))


def fsdp_bytes(parts: Counted, num_ranks: int, rank: int = 0) -> dict[str, int]:
    """Bytes by category on one rank of FSDP2, as allocated: weights and gradients with their padding."""

    def rows(part: Part) -> int:
        return local_rows(part.num_rows, num_ranks, 0 if part.category in PADDED else rank)

    return _sum(parts, lambda part: part.num_bytes(rows(part)))


def _sum(parts: Counted, size_of: Callable[[Part], int]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for part, count in parts:
        sizes[part.category] += count * size_of(part)
    return dict(sizes)
