"""Values computed on the device, delivered to the host without waiting for the step that computed them.

Whether a step was skipped is decided on the device. The scheduler, the log line and the hard stop need it on the
host, but reading it immediately would make the host wait for the entire step and leave the device idle while the
next one is prepared. So `push` starts a copy into pinned memory, records an event and returns, and a later `deliver`
returns the values: with `wait=False` only those that have arrived, with `wait=True` all of them.

On a CPU the values are available immediately. On accelerators without pinned memory and events the read waits, but
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
    """A queue of device tensors on their way to the host, in the order they were pushed."""

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()
        self._free: list[Tensor] = []  # pinned buffers to reuse: allocating one may wait for the device

    def __len__(self) -> int:
        return len(self._pending)

    def push(self, values: Tensor, payload: Any = None) -> None:
        """Start copying `values` (a small vector) to the host; `payload` is returned with them.

        While a CUDA graph is captured nothing reaches the host, so nothing is queued.
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
            values = values.clone()  # the caller keeps modifying its tensor
        self._pending.append(_Pending(payload, values, event))

    def deliver(self, *, wait: bool) -> list[tuple[Any, list[float]]]:
        """The payloads and values that have arrived, oldest first; all of them if `wait`."""
        return [(pending.payload, pending.values.tolist()) for pending in self._arrived(wait=wait)]

    def deliver_tensors(self, *, wait: bool) -> list[tuple[Any, Tensor]]:
        """As `deliver`, with the values as a tensor on the host that the caller may keep: for large ones.

        While a CUDA graph is captured nothing is delivered: asking an event would end the capture with an error.
        """
        return [(p.payload, p.values if p.event is None else p.values.clone()) for p in self._arrived(wait=wait)]

    def _arrived(self, *, wait: bool) -> list[_Pending]:
        """What has arrived; its buffers are free for the next push."""
        arrived: list[_Pending] = []
        if self._pending and self._pending[0].event is not None and torch.cuda.is_current_stream_capturing():
            return arrived
        while self._pending:
            first = self._pending[0]
            if first.event is not None:
                if wait:
                    first.event.synchronize()
                elif not first.event.query():  # type: ignore[no-untyped-call]
                    break
            self._pending.popleft()
            arrived.append(first)
            if first.event is not None:
                self._free.append(first.values)
        return arrived

    def _buffer(self, like: Tensor) -> Tensor:
        for i, buffer in enumerate(self._free):
            if buffer.shape == like.shape and buffer.dtype == like.dtype:
                return self._free.pop(i)
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # pending copies belong to this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
