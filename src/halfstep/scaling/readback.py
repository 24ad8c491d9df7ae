"""Values that are known on the device, delivered to the host without waiting for the step that made them.

Whether a step was skipped is decided on the device. The scheduler, the log line and the loud stop need it on
the host, but reading it at once would make the host wait for the whole step and leave the device idle while
the next one is prepared. So `push` starts a copy into pinned memory behind an event and returns, and a later
`deliver` hands the values over: with `wait=False` only those that have arrived, with `wait=True` all of them.

On a CPU the values are there already, and on accelerators without pinned memory and events the read waits, but
only for work that is one step old.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Readback"]


@dataclass
class _Pending:
    payload: Any
    values: Tensor
    event: torch.cuda.Event | None


class Readback:
    """A queue of small device vectors on their way to the host, in the order they were pushed."""

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()
        self._free: list[Tensor] = []  # pinned buffers to use again: allocating one may wait for the device

    def __len__(self) -> int:
        return len(self._pending)

    def push(self, values: Tensor, payload: Any = None) -> None:
        """Start copying `values` (a small vector) to the host; `payload` comes back with them.

        Inside the capture of a CUDA graph there is no host to tell, and nothing is queued.
        """
        values = values.detach()
        event = None
        if values.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return
            buffer = self._buffer(values)
            buffer.copy_(values, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            values = buffer
        else:
            values = values.clone()  # the caller goes on changing its own
        self._pending.append(_Pending(payload, values, event))

    def deliver(self, *, wait: bool) -> list[tuple[Any, list[float]]]:
        """The payloads and values that have arrived, oldest first; all of them if `wait`."""
        arrived = []
        while self._pending:
            first = self._pending[0]
            if first.event is not None:
                if wait:
                    first.event.synchronize()
                elif not first.event.query():  # type: ignore[no-untyped-call]
                    break
            self._pending.popleft()
            arrived.append((first.payload, first.values.tolist()))
            if first.event is not None:
                self._free.append(first.values)
        return arrived

    def _buffer(self, like: Tensor) -> Tensor:
        for i, buffer in enumerate(self._free):
            if buffer.shape == like.shape and buffer.dtype == like.dtype:
                return self._free.pop(i)
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # what is under way belongs to this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
