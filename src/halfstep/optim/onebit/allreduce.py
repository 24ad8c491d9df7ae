"""Compressed all-reduce with error feedback: the mean over ranks of fp32 tensors, sent with one bit per element.

How it works, with n ranks, for a tensor x_i of N elements on rank i (1-bit Adam, arXiv 2102.02888, algorithm 1; DeepSpeed's
`compressed_allreduce` is the same):

    worker i   v = x_i + e_i                      what compression lost before is added
               s_i = |v|_2 / sqrt(N)              one scale per tensor
               e_i = v - s_i sign(v)              what it loses now is remembered
      all-to-all: the signs of chunk j, and s_i, go to rank j
    server j   u = mean_i s_i sign(v_i)[chunk j] + d_j
               t_j = |u|_2 / sqrt(elements of the chunk)
               d_j = u - t_j sign(u)
      all-gather: the signs of u, and t_j
    result     t_j sign(u), chunk after chunk, the same bits on every rank

Zero has the sign +1: a sign cannot represent it, so an element that is always 0 comes back as plus or minus the scale (the
optimizers have `exp_avg_mask` for these).

A chunk is ceil(N / 8n) bytes of signs, so the last chunks may have padding. Padding has no value, no error and no part in the
norms or their denominators. DeepSpeed's does: it counts the padding in sqrt(P), compresses it like elements and stores errors for
it, so its scales are smaller by up to sqrt(N / P) and what padding "loses" feeds back into every later norm. Where N is a multiple
of 8n and (for other numbers of ranks than powers of two) of DeepSpeed's own padding, both are the same.

Every tensor has its own scale, but all tensors share two messages: chunk j of each tensor, then the scales as bytes. Large
models are divided into buckets, and while the bytes of one bucket are under way the next is compressed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.kernels.signs.signs import pack_signs, unpack_signs
from halfstep.kernels.table import copied_to
from halfstep.optim.onebit.wire import Pending, Wire

__all__ = ["ChunkPlan", "Reduced", "compressed_allreduce", "compressed_bytes", "server_bytes"]

_BUCKET = 1 << 24  # elements that are compressed together: 64 MiB of fp32 and 2 MiB on the wire
_SCALE_BYTES = 4


@dataclass(frozen=True)
class ChunkPlan:
    """How tensors of these sizes are divided between ranks."""

    sizes: tuple[int, ...]  # elements, at least 1 each
    num_ranks: int

    @property
    def chunk_bytes(self) -> tuple[int, ...]:
        """Bytes of signs that a rank serves, by tensor."""
        return tuple(-(-size // (8 * self.num_ranks)) for size in self.sizes)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Elements of a chunk with its padding, by tensor."""
        return tuple(8 * num_bytes for num_bytes in self.chunk_bytes)

    @property
    def message_bytes(self) -> int:
        """Bytes of one message: a chunk of each tensor, and the scales."""
        return sum(self.chunk_bytes) + _SCALE_BYTES * len(self.sizes)

    def served(self, rank: int) -> tuple[int, ...]:
        """Elements without padding that a rank serves, by tensor."""
        return tuple(
            min(max(size - rank * chunk, 0), chunk) for size, chunk in zip(self.sizes, self.chunk_sizes, strict=True)
        )


@dataclass(frozen=True)
class Reduced:
    """The result of a compressed all-reduce of one list of tensors: means, and the errors to feed back at the next call."""

    means: list[Tensor]
    worker_errors: list[Tensor]
    server_error: Tensor


def compressed_bytes(sizes: Sequence[int], num_ranks: int) -> int:
    """What each rank sends in one compressed all-reduce of tensors of these sizes, scales included."""
    plan = ChunkPlan(tuple(size for size in sizes if size), num_ranks)
    return 2 * (num_ranks - 1) * plan.message_bytes


def server_bytes(sizes: Sequence[int], num_ranks: int) -> int:
    """The errors that a rank stores as a server of tensors of these sizes, at most: about 4 / n bytes per element."""
    plan = ChunkPlan(tuple(size for size in sizes if size), num_ranks)
    return 4 * sum(plan.served(0)) if num_ranks > 1 else 0


def compressed_allreduce(
    units: Sequence[Sequence[Tensor]],  # tensors that share a scale, as if they were one; fp32, of one device
    worker_errors: Sequence[Sequence[Tensor]],  # of the same shapes
    server_errors: Sequence[Tensor | None],  # by unit, flat; None: zero
    wire: Wire,
) -> list[Reduced]:
    """Reduce each unit; every rank must pass the same sizes in the same order. The inputs are not changed."""
    transfers = [_Transfer(units[b], worker_errors[b], server_errors[b], wire) for b in _bucket_slices(units)]
    for transfer in transfers:
        transfer.send()
    for transfer in transfers:
        transfer.serve()
    return [reduced for transfer in transfers for reduced in transfer.receive()]


class _Transfer:
    """One bucket on its way: `send`, `serve`, `receive`."""

    def __init__(
        self,
        units: Sequence[Sequence[Tensor]],
        worker_errors: Sequence[Sequence[Tensor]],
        server_errors: Sequence[Tensor | None],
        wire: Wire,
    ) -> None:
        self._units, self._wire = units, wire
        self._worker_errors, self._server_errors = worker_errors, server_errors
        self._device = units[0][0].device
        self._plan = ChunkPlan(tuple(sum(t.numel() for t in unit) for unit in units), wire.num_ranks)
        self._pending: Pending | None = None
        self._lost = self._lost_by_server = torch.empty(0)

    def send(self) -> None:
        """Compress the tensors and send each rank its chunk of all of them."""
        plan, num_ranks = self._plan, self._wire.num_ranks
        padded = [num_ranks * size for size in plan.chunk_sizes]
        values = torch.zeros(sum(padded), dtype=torch.float32, device=self._device)
        for target, tensor, error in zip(self._parts(values), self._flat(), self._flat_errors(), strict=True):
            torch.add(tensor, error, out=target)
        elements = [part[:size] for part, size in zip(torch.split(values, padded), plan.sizes, strict=True)]
        scales = self._scales(elements)
        packed = pack_signs(values)
        self._lost = values.sub_(self._scaled(unpack_signs(packed), scales, padded))
        chunks = [c.view(num_ranks, -1) for c in torch.split(packed, [p // 8 for p in padded])]
        self._pending = self._wire.exchange(torch.cat([*chunks, _as_bytes(scales).expand(num_ranks, -1)], dim=1))

    def serve(self) -> None:
        """Average this rank's chunks, compress the means and send them to all ranks."""
        plan, num_ranks = self._plan, self._wire.num_ranks
        signs, scales = self._arrived()
        means = torch.zeros(sum(plan.chunk_sizes), dtype=torch.float32, device=self._device)
        for row, scale in zip(signs, scales, strict=True):
            means.add_(self._scaled(unpack_signs(row), scale / num_ranks, plan.chunk_sizes))
        served = self._served(means)
        for part, error in zip(served, self._server_errors, strict=True):
            if error is not None:
                part.add_(error)
        own_scales = self._scales(served)
        packed = pack_signs(means)
        self._lost_by_server = means.sub_(self._scaled(unpack_signs(packed), own_scales, plan.chunk_sizes))
        self._pending = self._wire.gather(torch.cat([packed, _as_bytes(own_scales)]))

    def receive(self) -> list[Reduced]:
        """The means of every chunk, as tensors of the input's shapes."""
        plan, num_ranks = self._plan, self._wire.num_ranks
        signs, scales = self._arrived()
        by_unit = [part.reshape(-1) for part in torch.split(signs, list(plan.chunk_bytes), dim=1)]
        repeats = [size for size in plan.chunk_sizes for _ in range(num_ranks)]
        means = self._scaled(unpack_signs(torch.cat(by_unit)), scales.t().reshape(-1), repeats)
        results, lost = iter(self._parts(means)), iter(self._parts(self._lost))
        return [
            Reduced(
                [next(results).view(t.shape) for t in unit], [next(lost).view(t.shape) for t in unit], server.clone()
            )
            for unit, server in zip(self._units, self._served(self._lost_by_server), strict=True)
        ]

    def _arrived(self) -> tuple[Tensor, Tensor]:
        """The signs and the scales of the message of every rank."""
        assert self._pending is not None
        rows = self._pending.wait()
        num_bytes = sum(self._plan.chunk_bytes)
        return rows[:, :num_bytes].contiguous(), rows[:, num_bytes:].contiguous().view(torch.float32)

    def _flat(self) -> list[Tensor]:
        return [t.reshape(-1) for unit in self._units for t in unit]

    def _flat_errors(self) -> list[Tensor]:
        return [t.reshape(-1) for unit in self._worker_errors for t in unit]

    def _parts(self, values: Tensor) -> list[Tensor]:
        """The elements of each tensor in a buffer of whole chunks."""
        parts, start = [], 0
        for unit, chunk in zip(self._units, self._plan.chunk_sizes, strict=True):
            at = start
            for tensor in unit:
                parts.append(values[at : at + tensor.numel()])
                at += tensor.numel()
            start += self._wire.num_ranks * chunk
        return parts

    def _served(self, values: Tensor) -> list[Tensor]:
        """The elements that this rank serves, by unit, in a buffer of one chunk of each."""
        counts = self._plan.served(self._wire.rank)
        return [
            part[:count] for part, count in zip(torch.split(values, list(self._plan.chunk_sizes)), counts, strict=True)
        ]

    def _scales(self, parts: Sequence[Tensor]) -> Tensor:
        """The root mean square of each part, 0 where it is empty."""
        norms = torch.stack([torch.linalg.vector_norm(part) for part in parts])
        roots = torch.tensor([math.sqrt(max(part.numel(), 1)) for part in parts], dtype=torch.float32)
        return norms / copied_to(roots, self._device)

    def _scaled(self, signs: Tensor, scales: Tensor, counts: Sequence[int]) -> Tensor:
        """Signs in place times the scale of their part, where parts have these counts."""
        if self._device.type == "cpu":  # one pass over each part; elsewhere one launch for all
            for part, scale in zip(torch.split(signs, list(counts)), scales, strict=True):
                part.mul_(scale)
            return signs
        repeats = copied_to(torch.tensor(counts), self._device)
        return signs.mul_(torch.repeat_interleave(scales, repeats, output_size=sum(counts)))


def _as_bytes(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.uint8)


def _bucket_slices(units: Sequence[Sequence[Tensor]]) -> list[slice]:
    slices: list[slice] = []
    start = size = 0
    for i, unit in enumerate(units):
        numel = sum(t.numel() for t in unit)
        if i > start and size + numel > _BUCKET:
            slices.append(slice(start, i))
            start, size = i, 0
        size += numel
    return [*slices, slice(start, len(units))] if units else []
