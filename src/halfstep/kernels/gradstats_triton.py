"""Pass 1 of the fused step: one launch that reads every gradient once and squares it up, tensor by tensor.

Each program sums one chunk; a second, tiny launch adds the chunks of a tensor in a fixed order, so that the result is
the same bit for bit from run to run. A sum of squares is inf or NaN exactly if an element is (or if it leaves fp32), so
the finite check costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.table import CHUNK, ChunkTable, PointerTable

__all__ = ["GradStats"]

_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _sumsq_kernel(
    chunks,  # int64 (C, 2): tensor, start
    pointers,  # int64 (T, 2): gradient, aligned
    numels,  # int64 (T,)
    partial,  # fp32 (C,)
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunks + 2 * program)
    start = tl.load(chunks + 2 * program + 1)
    left = tl.load(numels + tensor) - start
    place = tl.load(pointers + 2 * tensor).to(tl.pointer_type(DTYPE)) + start
    offsets = tl.arange(0, CHUNK)
    if (left >= CHUNK) & (tl.load(pointers + 2 * tensor + 1) == 1):
        # Unmasked loads of aligned addresses become 16-byte vectors; masked ones take 1.4 times as long.
        values = tl.load(tl.multiple_of(place, 16) + offsets).to(tl.float32)
        tl.store(partial + program, tl.sum(values * values))
    else:
        values = tl.load(place + offsets, mask=offsets < left, other=0.0).to(tl.float32)
        tl.store(partial + program, tl.sum(values * values))


@triton.jit
def _per_tensor_kernel(
    partial,  # fp32 (C,)
    first,  # int64 (T + 1,): the chunks of each tensor
    sums,  # fp32 (T,)
    BLOCK: tl.constexpr,
):
    tensor = tl.program_id(0)
    begin = tl.load(first + tensor)
    end = tl.load(first + tensor + 1)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for at in range(begin, end, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        total += tl.load(partial + offsets, mask=offsets < end, other=0.0)
    tl.store(sums + tensor, tl.sum(total))


class GradStats:
    """Sums of squares of a list of gradients of one dtype on one device; keeps its tables from step to step."""

    def __init__(self) -> None:
        self._pointers = PointerTable()
        self._chunks: ChunkTable | None = None
        self._partial: Tensor | None = None

    def sums(self, grads: Sequence[Tensor]) -> Tensor:
        """The sum of squares of each gradient, in fp32."""
        sizes = tuple(g.numel() for g in grads)
        device = grads[0].device
        if self._chunks is None or self._chunks.sizes != sizes:
            self._chunks = ChunkTable(sizes, device)
            self._partial = torch.empty(self._chunks.num_chunks, dtype=torch.float32, device=device)
        chunks, partial = self._chunks, self._partial
        pointers = self._pointers.refresh(grads)
        sums = torch.empty(len(grads), dtype=torch.float32, device=device)
        if chunks.num_chunks:
            _sumsq_kernel[(chunks.num_chunks,)](
                chunks.rows, pointers, chunks.numels, partial, DTYPE=_TL[grads[0].dtype], CHUNK=CHUNK, num_warps=8
            )
        _per_tensor_kernel[(len(grads),)](partial, chunks.first, sums, BLOCK=256, num_warps=1)
        return sums
