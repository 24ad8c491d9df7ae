"""Optimizer states in slabs: the large entries of many parameters share a few allocations.

CUDA's caching allocator serves a request above 1 MiB from a larger block and splits off the remainder only if that is above
1 MiB as well, so every such tensor may occupy up to 1 MiB that nobody uses. A network has hundreds of state entries of a
few MiB: on models of 20 to 90 million parameters, one allocation for each lost 0.1 to 0.3 bytes per parameter (H200, torch
2.11). In slabs of up to 128 MiB the loss is below 1 %.

An entry remains a tensor of its own, contiguous and aligned as the allocator aligns, with its own version counter; only the
storage is shared, by entries of one dtype: `torch.save` rejects a storage of two. State dicts look the same, and `torch.save`
stores a shared storage once. A slab is freed with the last of its entries.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "DEVICE_TYPES", "SEPARATE", "SLAB", "gather", "runs"]

T = TypeVar("T")
DEVICE_TYPES = frozenset({"cuda", "xpu"})  # whose allocators lose remainders
ALIGNMENT = 512  # bytes, as the allocators'
SEPARATE = 1 << 20  # bytes up to which the allocators split exactly, so that a slab gains nothing
SLAB = 128 << 20  # bytes at most: while one is filled, its entries exist twice


def gather(states: Iterable[dict[str, Any]]) -> None:
    """Move the large entries of these states into slabs, in their dictionaries.

    `states` may create each state as it is asked for it: no more than a slab's entries of each dtype wait to be moved.
    """
    entries = (_Entry(state, name) for state in states for name in list(state) if _is_separate(state[name]))
    for run in runs(entries, lambda e: e.tensor.nbytes, lambda e: (e.tensor.device, e.tensor.dtype)):
        if len(run) > 1:
            _move(run)


def runs(items: Iterable[T], size_of: Callable[[T], int], kind_of: Callable[[T], Hashable]) -> Iterator[list[T]]:
    """The items that share a slab: of one kind, at most a slab together; an item of SEPARATE or less is on its own."""
    waiting: dict[Hashable, list[T]] = {}
    totals: dict[Hashable, int] = {}
    for item in items:
        size, kind = _aligned(size_of(item)), kind_of(item)
        if size <= SEPARATE:
            yield [item]
            continue
        if totals.get(kind, 0) + size > SLAB and kind in waiting:
            yield waiting.pop(kind)
            totals[kind] = 0
        waiting.setdefault(kind, []).append(item)
        totals[kind] = totals.get(kind, 0) + size
    yield from waiting.values()


class _Entry(NamedTuple):
    """One entry of a state."""

    state: dict[str, Any]
    name: str

    @property
    def tensor(self) -> Tensor:
        value: Tensor = self.state[self.name]
        return value


def _move(run: list[_Entry]) -> None:
    first = run[0].tensor
    size = sum(_aligned(entry.tensor.nbytes) for entry in run)
    slab = torch.empty(size // first.itemsize, dtype=first.dtype, device=first.device)
    offset = 0
    for entry in run:
        value = entry.tensor
        # Not a view, so that a write to one entry does not count as a change of the others.
        part = torch.empty(0, dtype=value.dtype, device=value.device)
        part.set_(slab.untyped_storage(), offset // value.itemsize, value.shape, value.stride())
        entry.state[entry.name] = part.copy_(value)
        offset += _aligned(value.nbytes)


def _is_separate(value: Any) -> bool:
    """Whether this is a large dense tensor with a storage of its own."""
    return (
        type(value) is Tensor
        and value.device.type in DEVICE_TYPES
        and _aligned(value.nbytes) > SEPARATE
        and value.is_contiguous()
        and value.untyped_storage().nbytes() < value.nbytes + ALIGNMENT
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
