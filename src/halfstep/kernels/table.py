"""Tables that let one kernel launch work on many tensors.

A model has hundreds of tensors, and a launch for each costs more than its work. So the tensors are described to the
kernel by tables in device memory: a row of pointers and sizes per tensor, and a row per chunk
of elements that says which tensor it belongs to and where it starts. One program of the kernel works on one chunk.

The chunk table depends on the sizes alone and is kept. The pointers change when gradients are allocated anew, so they
are compared with those on the device at every step and copied, through pinned memory and without a wait, only when
they differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["ChunkTable", "PointerTable", "to_device"]


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy of `values` on the device that nobody waits for."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


class ChunkTable:
    """Which tensor each chunk is of, and the how-manieth of it: int32 rows (tensor, number).

    Whole chunks of aligned tensors come first, `num_full` of them: the kernel reads those in vectors, without masks.
    The rest, tails and tensors at odd addresses, follow.
    """

    def __init__(self, sizes: Sequence[int], aligned: Sequence[bool], chunk: int, device: torch.device) -> None:
        self.key = (tuple(sizes), tuple(aligned))
        numels = np.asarray(sizes, dtype=np.int64)
        counts = (numels + chunk - 1) // chunk
        first = np.concatenate(([0], np.cumsum(counts)))
        owner = np.repeat(np.arange(len(numels)), counts)
        number = np.arange(first[-1]) - first[owner]
        full = (numels[owner] - number * chunk >= chunk) & np.asarray(aligned, dtype=bool)[owner]
        rows = np.stack((owner, number), axis=1).astype(np.int32)
        self.num_chunks, self.num_full = len(rows), int(full.sum())
        self.rows = to_device(np.concatenate((rows[full], rows[~full])), device)
        self.numels = to_device(numels, device)
        # Where each tensor's whole chunks begin, and its others, and the ends of both.
        whole, others = (np.bincount(owner[which], minlength=len(numels)) for which in (full, ~full))
        bounds = np.zeros((2, len(numels) + 1), dtype=np.int64)
        bounds[0, 1:], bounds[1, 1:] = np.cumsum(whole), np.cumsum(others)
        bounds[1] += self.num_full
        self.bounds = to_device(bounds, device)


class PointerTable:
    """Addresses of `width` lists of tensors, one row per position in the lists: int64 on the device."""

    def __init__(self) -> None:
        self._host: np.ndarray | None = None
        self._device: Tensor | None = None

    def refresh(self, *columns: Sequence[Tensor]) -> Tensor:
        """The table for these lists; copied to the device only if an address changed."""
        rows = np.array([[t.data_ptr() for t in column] for column in columns], dtype=np.int64).T
        if self._host is None or self._device is None or not np.array_equal(rows, self._host):
            self._host, self._device = rows, to_device(rows, columns[0][0].device)
        return self._device

    def holds(self, column: Sequence[Tensor]) -> bool:
        """Whether the table, of one column, has just these addresses."""
        return self._host is not None and self._host[:, 0].tolist() == [t.data_ptr() for t in column]

    @property
    def table(self) -> Tensor:
        """The table on the device, as `refresh` left it."""
        assert self._device is not None
        return self._device

    def aligned(self) -> tuple[bool, ...]:
        """For each position, whether every tensor there starts at a multiple of 16 bytes."""
        assert self._host is not None
        return tuple((self._host % 16 == 0).all(axis=1).tolist())
