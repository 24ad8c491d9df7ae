"""Tables that let one kernel launch work on many tensors.

A model has hundreds of tensors, and a launch for each would cost more than its work. So tables in device memory describe
the tensors to the kernel: a row of pointers per tensor, and a row per chunk of elements with the tensor it belongs to and
its position there. One program of the kernel works on one chunk. `Pointer` names the columns of the fused step's pointers;
the columns of an optimizer's settings are named next to its reference (`AdamColumn`, `SGDColumn`, `LionColumn`).

The chunk table depends only on the sizes and is reused. The pointers change when gradients are reallocated, which they are in
every step: what a forward keeps alive moves them. But the allocator comes back to the same memory every two to eight steps
(DistilBERT 2, OpenAI GPT 3, ViT-S 8), so the tables of the last few steps stay on the device, and only addresses that are
in none of them are copied there, through pinned memory and without a wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "BIN_OF_1",
    "CHUNK_BYTES",
    "INF",
    "LARGEST",
    "LAUNCH_SHAPES",
    "NAN",
    "NUM_BINS",
    "NUM_COLUMNS",
    "NUM_FACTORS",
    "NUM_MOMENTS",
    "NUM_RECENT",
    "NUM_SETTINGS",
    "SMALLEST",
    "ZEROS",
    "ChunkTable",
    "Extent",
    "Pointer",
    "PointerTable",
    "RecentTables",
    "chunk_size",
    "copied_to",
    "table_bytes",
    "to_device",
]

T = TypeVar("T")


class Pointer(IntEnum):
    """Columns of the fused step's int64 table of addresses, one row per tensor."""

    GRAD = 0
    WEIGHT = 1
    MASTER = 2  # the low halves or the fp32 copy
    FIRST = 3  # moments
    SECOND = 4
    FIRST_SCALE = 5  # scales of their 8-bit codes
    SECOND_SCALE = 6


NUM_SETTINGS = 7  # columns of the float64 table of a group's settings; a rule may use fewer
NUM_FACTORS = 10  # columns of the fp32 table of a tensor's factors in one step; a rule may use fewer
NUM_MOMENTS = 2  # moments per tensor that the fused kernel can update
NUM_RECENT = 8  # sets of addresses whose tables stay on the device
CHUNK_BYTES = 2 * 4  # of a row of the chunk table: the tensor, and the position in it
# Elements and warps of a program, by the moments' dtype. On an H200 with ViT-L/16 and bf16 weights the pass takes 1.19 ms
# with 8-bit moments (1.23 at 256 elements and one warp, 1.26 at 1024 and two) and 1.90 with fp32 ones, as at 512/1 and 1024/2.
LAUNCH_SHAPES: dict[torch.dtype | None, tuple[int, int]] = {
    None: (512, 2),
    torch.float32: (512, 2),
    torch.bfloat16: (512, 2),
    torch.int8: (512, 1),
}

# Columns of the table that exponents are counted in (`kernels/exponents.py`), one row per tensor: bins, then NaN and so on.
NUM_BINS = 256
BIN_OF_1 = (
    192  # bins for 2^-192 to 2^63: fp32's subnormals divided by a loss scale of 2^43, and more than gradients reach
)
NAN, INF, ZEROS, LARGEST, SMALLEST = range(NUM_BINS, NUM_BINS + 5)
NUM_COLUMNS = NUM_BINS + 5


def copied_to(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on another device, without a wait unless that is the host.

    With `non_blocking` torch copies from a GPU to the host behind the back of the host, which then computes with memory that
    nothing has been written to yet: a flag that has not arrived reads as 0, and the step is not skipped.
    """
    return tensor.to(device, dtype or tensor.dtype, non_blocking=torch.device(device).type != "cpu")


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy `values` to the device without waiting for the copy."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


class ChunkTable:
    """Maps each chunk to (tensor index, chunk index within the tensor): int32 rows.

    Full chunks of aligned tensors come first, `num_full` of them: the kernel reads those in vectors, without masks.
    The others, tails and tensors at unaligned addresses, follow.
    """

    def __init__(self, sizes: Sequence[int], aligned: Sequence[bool], chunk: int, device: torch.device) -> None:
        self.key = (tuple(sizes), tuple(aligned))
        numels = np.asarray(sizes, dtype=np.int64)
        counts = (numels + chunk - 1) // chunk
        first = np.concatenate(([0], np.cumsum(counts)))
        owner = np.repeat(np.arange(len(numels)), counts)
        index = np.arange(first[-1]) - first[owner]
        full = (numels[owner] - index * chunk >= chunk) & np.asarray(aligned, dtype=bool)[owner]
        rows = np.stack((owner, index), axis=1).astype(np.int32)
        self.num_chunks, self.num_full = len(rows), int(full.sum())
        self.rows = to_device(np.concatenate((rows[full], rows[~full])), device)
        self.numels = to_device(numels, device)
        # Where each tensor's full chunks begin and end, and where its others do.
        num_full, num_others = (np.bincount(owner[mask], minlength=len(numels)) for mask in (full, ~full))
        bounds = np.zeros((2, len(numels) + 1), dtype=np.int64)
        bounds[0, 1:], bounds[1, 1:] = np.cumsum(num_full), np.cumsum(num_others)
        bounds[1] += self.num_full
        self.bounds = to_device(bounds, device)


class Extent(NamedTuple):
    """Where the elements of a tensor are: rows of `inner` elements that begin `pitch` elements apart."""

    pointer: int
    numel: int  # of different addresses: an expanded tensor has fewer than elements
    inner: int
    pitch: int


class RecentTables(Generic[T]):
    """What was made for the last few keys, which contain the addresses of a step's gradients."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[Any, ...], T] = OrderedDict()

    def get(self, key: tuple[Any, ...]) -> T | None:
        """What was added under this key, if that was not long ago."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def add(self, key: tuple[Any, ...], entry: T) -> None:
        """Remember this one instead of the one that was not used for longest.

        While a CUDA graph is captured nothing is remembered: the graph's memory has other contents after its next replay.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        self._entries[key] = entry
        if len(self._entries) > NUM_RECENT:
            self._entries.popitem(last=False)


class PointerTable:
    """Addresses of one or more lists of tensors, a column per list: int64 on the device."""

    def __init__(self) -> None:
        self._host: np.ndarray | None = None
        self._device: Tensor | None = None

    def refresh(self, *columns: Sequence[Tensor]) -> Tensor:
        """The table for these lists; copied to the device only if an address changed."""
        rows = np.array([[t.data_ptr() for t in column] for column in columns], dtype=np.int64).T
        if self._host is None or self._device is None or not np.array_equal(rows, self._host):
            self._host, self._device = rows, to_device(rows, columns[0][0].device)
        return self._device

    @property
    def table(self) -> Tensor:
        """The table on the device, as `refresh` left it."""
        assert self._device is not None
        return self._device

    def aligned(self) -> tuple[bool, ...]:
        """For each position, whether every tensor there starts at a multiple of 16 bytes."""
        assert self._host is not None
        return tuple((self._host % 16 == 0).all(axis=1).tolist())


def chunk_size(moment_dtype: torch.dtype | None) -> int:
    """Elements of a tensor that one program of the fused step updates."""
    return LAUNCH_SHAPES[moment_dtype][0]


def table_bytes(sizes: Sequence[int], moment_dtype: torch.dtype | None) -> int:
    """Device bytes of the tables that the fused step keeps for tensors of these sizes, the groups' settings aside."""
    chunk = chunk_size(moment_dtype)
    num_chunks = sum(-(-size // chunk) for size in sizes)
    pointers = 8 * len(Pointer) * len(sizes)
    chunks = (
        CHUNK_BYTES * num_chunks + 8 * len(sizes) + 2 * 8 * (len(sizes) + 1)
    )  # rows, numels and bounds of a ChunkTable
    return pointers + chunks + (4 + 4) * len(sizes)  # step counts and group numbers
