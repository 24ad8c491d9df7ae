"""A model of torch's caching allocator: how many bytes a sequence of allocations really takes on a GPU.

How it works. `torch.cuda.max_memory_allocated()` does not count the bytes that tensors ask for, but the blocks they are
given, and those are larger. Torch rounds every request up to 512 bytes, takes memory from the driver in segments, cuts
blocks from them, and joins neighbours again when they are freed:

    request of at most 1 MiB     from a segment of 2 MiB; what remains is always cut off
    below 10 MiB                 from a segment of 20 MiB; what remains is cut off if it is more than 1 MiB
    from 10 MiB on               a segment of its own size rounded up to 2 MiB, cut in the same way

So a tensor of 49.2 MiB in a fresh segment of 50 MiB takes 50 MiB: up to 1 MiB per large tensor is given away, 1 % and
more of a ViT's activations. The free block that fits best is taken first. The sum of the segments is what
`memory_reserved` shows; blocks that are free and fit nothing are fragmentation.

The numbers are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.9 to 2.13, with its default settings: no expandable
segments, no split limit.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

__all__ = ["Allocator", "round_up"]

ROUNDING = 512
SMALL = 1 << 20  # largest request of the small pool, and the least remainder worth cutting off in the large one
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_FROM = 10 << 20
SEGMENT_ROUNDING = 2 << 20


def round_up(num_bytes: int, to: int = ROUNDING) -> int:
    """The next multiple of `to`; torch allocates at least one."""
    return max(to, -(-num_bytes // to) * to)


@dataclass(eq=False)
class _Block:
    """A piece of a segment, with its neighbours in it."""

    size: int
    address: int
    small: bool
    before: _Block | None = field(default=None, repr=False)
    after: _Block | None = field(default=None, repr=False)
    free: bool = True


class Allocator:
    """Follows allocations and frees; `allocated` and `reserved` are what torch would report."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        # Free blocks of the small and the large pool, sorted by size and then address, as torch's sets are.
        self._free: tuple[list[tuple[int, int, _Block]], list[tuple[int, int, _Block]]] = ([], [])
        self._next_address = 0

    def take(self, num_bytes: int) -> _Block:
        """Give a block for a request."""
        size = round_up(num_bytes)
        small = size <= SMALL
        pool = self._free[not small]
        index = bisect.bisect_left(pool, (size, -1))
        block = pool.pop(index)[2] if index < len(pool) else self._segment(size, small=small)
        remaining = block.size - size
        if remaining >= ROUNDING if small else remaining > SMALL:
            rest = _Block(remaining, block.address + size, small, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        block.free = False
        self.allocated += block.size
        return block

    def give(self, block: _Block) -> None:
        """Take a block back, joined with its free neighbours."""
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
        self._put(block)

    def _segment(self, size: int, *, small: bool) -> _Block:
        large = LARGE_SEGMENT if size < LARGE_FROM else round_up(size, SEGMENT_ROUNDING)
        whole = SMALL_SEGMENT if small else large
        self.reserved += whole
        block = _Block(whole, self._next_address, small)
        self._next_address += whole + 1  # segments are never neighbours
        return block

    def _put(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._free[not block.small], (block.size, block.address, block))
