"""Optimizer states in slabs: the large entries of many parameters share a few allocations.

CUDA's caching allocator serves a request above 1 MiB from a larger block and splits off the remainder only if that is above
1 MiB as well, so every such tensor may occupy up to 1 MiB that nobody uses. A network has hundreds of state entries of a
few MiB: on models of 20 to 90 million parameters, one allocation for each lost 0.1 to 0.3 bytes per parameter (H200, torch
2.11). In slabs of up to 128 MiB the loss is below 1 %.

An entry remains a tensor of its own, contiguous and aligned as the allocator aligns, with its own version counter; only the
storage is shared. State dicts look the same, and `torch.save` stores a shared storage once. A slab is freed with the last
of its entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

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

    `states` may create each state as it is asked for it: no more than a slab's entries wait to be moved.
    """
    entries = ((state, name) for state in states for name in list(state) if _is_separate(state[name]))
    for run in runs(entries, lambda entry: int(entry[0][entry[1]].nbytes), lambda entry: entry[0][entry[1]].device):
        if len(run) > 1:
            _move(run)


def runs(
    items: Iterable[T], size_of: Callable[[T], int], place_of: Callable[[T], object] = lambda _item: None
) -> Iterator[list[T]]:
    """Consecutive items that share a slab: of one place, at most a slab together; an item of SEPARATE or less is on its own."""
    run: list[T] = []
    total, place = 0, None
    for item in items:
        size = _aligned(size_of(item))
        if size <= SEPARATE:
            yield [item]
            continue
        if run and (total + size > SLAB or place_of(item) != place):
            yield run
            run, total = [], 0
        run.append(item)
        total, place = total + size, place_of(item)
    if run:
        yield run


def _move(run: list[tuple[dict[str, Any], str]]) -> None:
    first: Tensor = run[0][0][run[0][1]]
    slab = torch.empty(sum(_aligned(state[name].nbytes) for state, name in run), dtype=torch.uint8, device=first.device)
    offset = 0
    for state, name in run:
        value: Tensor = state[name]
        # Not a view, so that a write to one entry does not count as a change of the others.
        part = torch.empty(0, dtype=value.dtype, device=value.device)
        part.set_(slab.untyped_storage(), offset // value.itemsize, value.shape, value.stride())
        state[name] = part.copy_(value)
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
