"""Tables that let one kernel launch work on many tensors.

A model has hundreds of tensors, and a launch for each costs more than its work. So the tensors are described to the
kernel by tables in device memory: a row of pointers and sizes per tensor, and a row per chunk of at most `CHUNK`
elements that says which tensor it belongs to and where it starts. One program of the kernel works on one chunk.

The chunk table depends on the sizes alone and is kept. The pointers change when gradients are allocated anew, so they
are compared with those on the device at every step and copied, through pinned memory and without a wait, only when
they differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["CHUNK", "ChunkTable", "PointerTable", "to_device"]

CHUNK = 8192  # elements; on an H200 8192 was as fast as 16384 and faster than 4096


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy of `values` on the device that nobody waits for."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


class ChunkTable:
    """Which tensor and which place in it each chunk is: int64 rows (tensor, start), in order of the tensors."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = tuple(sizes)
        numels = np.asarray(self.sizes, dtype=np.int64)
        counts = (numels + CHUNK - 1) // CHUNK
        first = np.concatenate(([0], np.cumsum(counts)))
        owner = np.repeat(np.arange(len(numels)), counts)
        start = (np.arange(first[-1]) - first[owner]) * CHUNK if len(owner) else np.zeros(0, dtype=np.int64)
        self.num_chunks = int(first[-1])
        self.rows = to_device(np.stack((owner, start), axis=1).astype(np.int64), device)
        self.first = to_device(first.astype(np.int64), device)  # the first chunk of each tensor, and the end
        self.numels = to_device(numels, device)


class PointerTable:
    """Addresses of `width` lists of tensors, one row per position in the lists: int64 on the device."""

    def __init__(self) -> None:
        self._host: np.ndarray | None = None
        self._device: Tensor | None = None

    def refresh(self, *columns: Sequence[Tensor]) -> Tensor:
        """The table for these lists; copied to the device only if an address changed.

        The last column is 1 where every tensor of the row is aligned to 16 bytes, so that the kernel may load vectors.
        """
        addresses = np.array([[t.data_ptr() for t in column] for column in columns], dtype=np.int64).T
        aligned = (addresses % 16 == 0).all(axis=1, keepdims=True)
        rows = np.concatenate((addresses, aligned.astype(np.int64)), axis=1)
        if self._host is None or self._device is None or not np.array_equal(rows, self._host):
            self._host, self._device = rows, to_device(rows, columns[0][0].device)
        return self._device
