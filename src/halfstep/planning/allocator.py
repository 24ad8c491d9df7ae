"""A model of torch's caching allocator: how much memory a sequence of allocations really uses on a GPU.

How it works. `torch.cuda.max_memory_allocated()` does not count the bytes that tensors request but the blocks they get,
which are larger. torch rounds every request up to 512 bytes, allocates segments from the driver, splits blocks off them,
and merges neighbours again when they are freed:

    request of at most 1 MiB     from a segment of 2 MiB; the remainder is always split off
    below 10 MiB                 from a segment of 20 MiB; the remainder is split off if it is more than 1 MiB
    from 10 MiB on               a separate segment, the size rounded up to 2 MiB, split in the same way

So a tensor of 49.2 MiB in a fresh segment of 50 MiB uses 50 MiB: up to 1 MiB per large tensor is lost, 1 % and more of a
ViT's activations. The free block that fits best is used first. `memory_reserved` is the sum of the segments; free blocks
that fit no request are fragmentation.

The constants are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.9 to 2.13, with its default settings: no expandable
segments, no split limit.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

__all__ = ["Allocator", "round_up"]

ROUNDING = 512
SMALL = 1 << 20  # largest request of the small pool, and the largest remainder that the large pool does not split off
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_FROM = 10 << 20
SEGMENT_ROUNDING = 2 << 20


def round_up(num_bytes: int, to: int = ROUNDING) -> int:
    """The next multiple of `to`; torch allocates at least one."""
    return max(to, -(-num_bytes // to) * to)


@dataclass(eq=False)
class _Block:
    """A part of a segment, linked to its neighbours."""

    size: int
    address: int
    small: bool
    before: _Block | None = field(default=None, repr=False)
    after: _Block | None = field(default=None, repr=False)
    free: bool = True


class Allocator:
    """Follows allocations and frees; `allocated` and `reserved` are the values that torch would report."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        # Free blocks of the small and the large pool, sorted by size and then address, like torch's sets.
        self._free: tuple[list[tuple[int, int, _Block]], list[tuple[int, int, _Block]]] = ([], [])
        self._next_address = 0

    def allocate(self, num_bytes: int) -> _Block:
        """Return a block for a request."""
        size = round_up(num_bytes)
        small = size <= SMALL
        pool = self._free[not small]
        index = bisect.bisect_left(pool, (size, -1))
        block = pool.pop(index)[2] if index < len(pool) else self._new_segment(size, small=small)
        remaining = block.size - size
        if remaining >= ROUNDING if small else remaining > SMALL:
            rest = _Block(remaining, block.address + size, small, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            self._add_free(rest)
        block.free = False
        self.allocated += block.size
        return block

    def free(self, block: _Block) -> None:
        """Free a block and merge it with its free neighbours."""
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free:
                continue
            pool = self._free[not neighbour.small]
            del pool[bisect.bisect_left(pool, (neighbour.size, neighbour.address))]
            if neighbour is block.before:
                block.before, block.address = neighbour.before, neighbour.address
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = neighbour.after
                if block.after is not None:
                    block.after.before = block
            block.size += neighbour.size
        block.free = True
        self._add_free(block)

    def _new_segment(self, size: int, *, small: bool) -> _Block:
        large = LARGE_SEGMENT if size < LARGE_FROM else round_up(size, SEGMENT_ROUNDING)
        whole = SMALL_SEGMENT if small else large
        self.reserved += whole
        block = _Block(whole, self._next_address, small)
        self._next_address += whole + 1  # segments are never neighbours
        return block

    def _add_free(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._free[not block.small], (block.size, block.address, block))
