"""Copies of a run's tensors in host memory, taken while training waits, so that writing them can take its time.

The memory is allocated at the first copy and used again by each later one: pinned if there is a CUDA device, because only
then does a copy from the device run at the full speed of the bus, and pinning takes longer than copying. Copies from a
device run on a stream of their own. The stream that trains waits for them on the device, so whatever is launched after
`copy` may change the tensors; the host waits in `ready`, which the writing thread calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from halfstep.checkpoint.contents import Contents

__all__ = ["Snapshot"]

# A power of two, because torch rounds the size of pinned memory up to one.
_CHUNK_BYTES = 256 * 2**20
_ALIGNMENT = 64  # bytes; a multiple of every element size


class Snapshot:
    """Host memory for the tensors of one checkpoint at a time."""

    def __init__(self) -> None:
        self._chunks: dict[bool, list[Tensor]] = {}  # by whether they are pinned
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def num_bytes(self) -> int:
        """The memory that is allocated."""
        return sum(chunk.numel() for chunks in self._chunks.values() for chunk in chunks)

    def copy(self, contents: Contents) -> tuple[Contents, Callable[[], None]]:
        """The contents with copies of all tensors, and a function that waits until the copies are complete.

        The copies are valid until the next call.
        """
        named = [(file, name, tensor) for file, tensors in contents.tensors.items() for name, tensor in tensors.items()]
        copies: dict[str, dict[str, Tensor]] = {file: {} for file in contents.tensors}
        pairs: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for pinned in (False, True):
            mine = [entry for entry in named if _is_pinnable(entry[2].device) == pinned]
            places = self._places([tensor for *_, tensor in mine], pinned=pinned)
            for (file, name, tensor), place in zip(mine, places, strict=True):
                copies[file][name] = place
                pairs.setdefault(tensor.device, []).append((place, tensor))
        waits = [self._copy_from(device, some) for device, some in pairs.items()]
        # In the order of the original, which is the order of a state dict.
        tensors = {file: {name: copies[file][name] for name in mine} for file, mine in contents.tensors.items()}
        return replace(contents, tensors=tensors), lambda: _call_all(waits)

    def _places(self, tensors: list[Tensor], *, pinned: bool) -> list[Tensor]:
        """Host memory for each tensor, in the same chunks each time the same tensors come."""
        chunks, places = self._chunks.setdefault(pinned, []), []
        sizes = [-(-t.numel() * t.itemsize // _ALIGNMENT) * _ALIGNMENT for t in tensors]
        usual, number, start = min(_CHUNK_BYTES, sum(sizes)), 0, 0
        for tensor, size in zip(tensors, sizes, strict=True):
            while number < len(chunks) and start + size > chunks[number].numel():
                number, start = number + 1, 0
            if number == len(chunks):
                chunks.append(torch.empty(max(usual, size), dtype=torch.uint8, pin_memory=pinned))
            memory = chunks[number][start : start + tensor.numel() * tensor.itemsize]
            places.append(memory.view(tensor.dtype).view(tensor.shape))
            start += size
        return places

    def _copy_from(self, device: torch.device, pairs: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        if device.type != "cuda":
            _copy(pairs)
            return lambda: None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream, current = self._streams[device], torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            _copy(pairs, non_blocking=True)
            done = stream.record_event()
        current.wait_event(done)  # also keeps the allocator from reusing what was freed meanwhile

        def ready() -> None:
            done.synchronize()

        return ready


def _copy(pairs: Iterable[tuple[Tensor, Tensor]], *, non_blocking: bool = False) -> None:
    for place, tensor in pairs:
        _as_copyable(place).copy_(_as_copyable(tensor.detach()), non_blocking=non_blocking)


def _is_pinnable(device: torch.device) -> bool:
    return device.type == "cuda"


def _as_copyable(tensor: Tensor) -> Tensor:
    """As bytes where elements are bytes: not every 8-bit dtype can be copied on every device."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 and tensor.dtype is not torch.bool else tensor


def _call_all(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()
