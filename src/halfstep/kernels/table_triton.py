"""Chunks of tensors inside the Triton kernels: their addresses out of `kernels.table`, loads and stores."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["chunk_pointer", "load", "store"]


@triton.jit
def chunk_pointer(entry, start, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """The address of a chunk, from an entry of a table of pointers.

    `multiple_of` must be applied where the pointer is created. Applied to an argument of a function it is lost when the
    function is inlined, and every load is split into single elements: 64 load instructions instead of 9 for a chunk.
    """
    pointer = tl.load(entry).to(tl.pointer_type(DTYPE)) + start
    if FULL:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load(pointer, offsets, left, FULL: tl.constexpr):
    """A block at `pointer`: unmasked and in 16-byte vectors if the chunk is full and aligned, else padded with 0."""
    if FULL:
        return tl.load(pointer + offsets)
    return tl.load(pointer + offsets, mask=offsets < left, other=0)


@triton.jit
def store(pointer, offsets, values, left, FULL: tl.constexpr):
    """The counterpart of `load`."""
    if FULL:
        tl.store(pointer + offsets, values)
    else:
        tl.store(pointer + offsets, values, mask=offsets < left)
