"""The messages of the compressed optimizers, on torch.distributed alone, and the bytes that they put on the wire.

Four collectives are enough: all-to-all and all-gather of bytes for compressed values, all-reduce for gradients that are not
compressed, and an all-reduce of the overflow flag. gloo and NCCL have them all for these dtypes.

`sent_bytes` counts what this rank sends, as the usual algorithms do it: in an all-to-all and in an all-gather each rank sends
n - 1 times its own part, and in a ring all-reduce 2 (n - 1) / n times the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.errors import SettingError

__all__ = ["Pending", "Wire", "dense_bytes"]

_BUCKET = 1 << 23  # elements of a dense message: 32 MiB of fp32


@dataclass(frozen=True)
class Pending:
    """A message under way: what it will have received, and the handle to wait on."""

    received: Tensor
    handle: Any = None

    def wait(self) -> Tensor:
        """The received tensor, once it has arrived."""
        if self.handle is not None:
            self.handle.wait()
        return self.received


class Wire:
    """This rank's end of the messages between the ranks of a process group; one process has nobody to send to."""

    def __init__(self, process_group: Any = None) -> None:
        connected = dist.is_available() and dist.is_initialized()
        if process_group is not None and not connected:
            raise SettingError("process_group is set, but torch.distributed is not initialized in this process.")
        self.group = process_group
        self.rank = dist.get_rank(process_group) if connected else 0
        self.num_ranks = dist.get_world_size(process_group) if connected else 1
        if self.rank < 0:
            raise SettingError(
                "This rank is not a member of process_group; pass the group that contains it, or build no optimizer here."
            )
        self.sent_bytes = 0

    def exchange(self, rows: Tensor) -> Pending:
        """Send row j of a uint8 matrix to rank j; receives one row of every rank."""
        received = torch.empty_like(rows)
        self._count((self.num_ranks - 1) * rows.shape[1])
        return Pending(received, dist.all_to_all_single(received, rows, group=self.group, async_op=True))

    def gather(self, own: Tensor) -> Pending:
        """Send a uint8 vector to all ranks; receives the vector of every rank as a row."""
        received = torch.empty((self.num_ranks, own.numel()), dtype=own.dtype, device=own.device)
        self._count((self.num_ranks - 1) * own.numel())
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        return Pending(received, gather(received, own.unsqueeze(0), group=self.group, async_op=True))

    def average(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The means over all ranks of fp32 tensors of one device, in buckets."""
        if self.num_ranks == 1:
            return list(tensors)
        results: list[Tensor] = []
        for bucket in _buckets(tensors):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            self._count(dense_bytes(flat.numel() * 4, self.num_ranks))
            self._sum(flat)
            parts = torch.split(flat.mul_(1 / self.num_ranks), [t.numel() for t in bucket])
            results += [part.view(t.shape) for part, t in zip(parts, bucket, strict=True)]
        return results

    def any_set(self, flag: Tensor) -> Tensor:
        """1.0 if a flag is not 0 on some rank, else 0.0, as a tensor of the flag's device."""
        own = (flag.detach().reshape(()) != 0).to(torch.float32)
        if self.num_ranks > 1:
            self._count(dense_bytes(4, self.num_ranks))
            self._sum(own)
        return (own != 0).to(torch.float32)

    def same(self, numbers: Sequence[int]) -> bool:
        """Whether all ranks have the same integers."""
        if self.num_ranks == 1:
            return True
        device = torch.accelerator.current_accelerator() if self._needs_device() else torch.device("cpu")
        own = torch.tensor(numbers, dtype=torch.int64, device=device).view(torch.uint8)
        return bool((self.gather(own).wait() == own).all())

    def _sum(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def _count(self, num_bytes: int) -> None:
        self.sent_bytes += num_bytes

    def _needs_device(self) -> bool:
        return "gloo" not in str(dist.get_backend_config(self.group))


def dense_bytes(num_bytes: int, num_ranks: int) -> int:
    """What each rank sends in a ring all-reduce of a tensor of `num_bytes`."""
    return -(-2 * (num_ranks - 1) * num_bytes // num_ranks)


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not buckets or size + tensor.numel() > _BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.numel()
    return buckets
