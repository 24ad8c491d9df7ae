"""Buffers that a forward pass changes, restored when its step is skipped.

An overflowing forward leaves inf or NaN in batch-norm's running averages, and unlike gradients they stay. So before
the first forward of a step all buffers are copied, and after the step they are restored by the same flag that skipped
it, on the device. All of them, because nothing shows which ones a forward changes: batch-norm's kernels write through
raw pointers and do not even bump the tensor's version. They are small compared with the weights. Not covered are buffers
that do not have one number per place in memory: sparse ones (a graph's edges) and expanded views, which torch cannot
write into.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.engine.guards import count_registrations, num_registrations
from halfstep.events import log_warning

__all__ = ["RESTORE_COPIES", "BufferGuard"]

RESTORE_COPIES = (
    3  # of all buffers, that `restore_if` has at once: both flat and the selection; the planner counts them
)


class BufferGuard:
    """Copies of a model's buffers, and how to restore them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tables, self._registered = _tables(model), count_registrations(model)
        self._saved: dict[str, Tensor] | None = None

    def save(self) -> None:
        """Copy the buffers; does nothing if this step has already begun."""
        if self._saved is None:
            self._saved = {name: b.detach().clone() for name, b in self._buffers().items()}

    @property
    def copies(self) -> list[Tensor]:
        """The copies of this step, if it has begun."""
        return list((self._saved or {}).values())

    @torch.no_grad()
    def restore_if(self, found_inf: Tensor) -> None:
        """Restore the buffers if the flag is not 0, without reading it."""
        saved, self._saved = self._saved or {}, None
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for name, now in self._buffers().items():
            before = saved.get(name)
            if before is not None and (before.shape != now.shape or before.dtype != now.dtype):
                log_warning(f"Buffer {name} changed its shape or dtype and cannot be restored if this step is skipped.")
                continue
            if before is not None:
                groups.setdefault((now.device, now.dtype), []).append((before.to(now.device), now))
        for (device, _), pairs in groups.items():
            # One flat select per dtype: a network has hundreds of small buffers, and a launch for each would show.
            before, now = (torch.cat([pair[i].reshape(-1) for pair in pairs]) for i in (0, 1))
            chosen = torch.where(found_inf.to(device, non_blocking=True) != 0, before, now)
            parts = torch.split(chosen, [b.numel() for _, b in pairs])
            torch._foreach_copy_([b for _, b in pairs], [p.view_as(b) for p, (_, b) in zip(parts, pairs, strict=True)])

    def _buffers(self) -> dict[str, Tensor]:
        if self._registered != num_registrations():
            self._tables, self._registered = _tables(self._model), count_registrations(self._model)
        own = ((prefix, *item) for prefix, table in self._tables if table for item in table.items())
        # A buffer that two modules share is listed once.
        buffers = {b: f"{prefix}.{name}" if prefix else name for prefix, name, b in own if b is not None}
        return {name: b for b, name in buffers.items() if b.device.type != "meta" and _is_plain(b)}

    def forget(self) -> None:
        """End the step without restoring anything."""
        self._saved = None


def _tables(model: nn.Module) -> list[tuple[str, dict[str, Tensor | None]]]:
    """The modules' own tables of buffers, with the modules' names."""
    return [(name, module._buffers) for name, module in model.named_modules()]  # noqa: SLF001 - named_buffers() walks over all modules


def _is_plain(buffer: Tensor) -> bool:
    if buffer.layout is not torch.strided:
        return False
    return not any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
