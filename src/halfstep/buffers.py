"""Buffers that a forward pass changes, put back when its step is skipped.

An overflowing forward leaves inf or NaN in batch-norm's running averages, and unlike gradients they stay. So before
the first forward of a step the buffers are copied, and after the step they are put back by the same flag that skipped
it, on the device. The first step copies all of them; from then on only those that have been seen to change, so that
large constant buffers cost nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.events import warn

__all__ = ["BufferGuard"]


class BufferGuard:
    """Copies of a model's buffers, and the way back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._live: set[str] | None = None  # names of buffers known to change; None before the first step
        self._versions: dict[str, tuple[int, int]] = {}
        self._saved: dict[str, Tensor] = {}
        self._open = False

    def save(self) -> None:
        """Copy the buffers that this step's forwards may change; does nothing if the step has begun already."""
        if self._open:
            return
        self._open = True
        buffers = _buffers(self._model)
        self._versions = {name: (id(b), b._version) for name, b in buffers.items()}  # noqa: SLF001
        chosen = buffers if self._live is None else {n: b for n, b in buffers.items() if n in self._live}
        self._saved = {name: b.detach().clone() for name, b in chosen.items()}

    @torch.no_grad()
    def restore_if(self, found_inf: Tensor) -> None:
        """Put back what changed since `save` if the flag is not 0, without reading it."""
        if not self._open:
            return
        changed = self._changed()
        late = changed.keys() - self._saved.keys()
        if late:
            warn(f"Buffers that had not changed before changed now and cannot be put back for this step: {', '.join(sorted(late))}.")
        self._live = (self._live or set()) | changed.keys()
        groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name in changed.keys() & self._saved.keys():
            buffer = changed[name]
            if buffer.shape == self._saved[name].shape:
                groups.setdefault((buffer.device, buffer.dtype), []).append(name)
        for (device, _), names in groups.items():
            # One flat select per dtype: a network has hundreds of small buffers, and a launch for each would show.
            now = torch.cat([changed[n].reshape(-1) for n in names])
            before = torch.cat([self._saved[n].reshape(-1) for n in names])
            kept = torch.where(found_inf.to(device, non_blocking=True) != 0, before, now)
            parts = kept.split([changed[n].numel() for n in names])
            torch._foreach_copy_(  # noqa: SLF001 - one launch for all, as torch.optim does
                [changed[n] for n in names], [p.view_as(changed[n]) for p, n in zip(parts, names, strict=True)]
            )
        self.forget()

    def forget(self) -> None:
        """Close the step without putting anything back."""
        self._saved, self._open = {}, False

    def _changed(self) -> dict[str, Tensor]:
        return {
            name: b
            for name, b in _buffers(self._model).items()
            if self._versions.get(name) != (id(b), b._version)  # noqa: SLF001
        }


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in model.named_buffers() if b.device.type != "meta"}
