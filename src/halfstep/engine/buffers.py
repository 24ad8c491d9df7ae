"""Buffers that a forward pass changes, restored when its step is skipped.

An overflowing forward leaves inf or NaN in batch-norm's running averages, and unlike gradients they stay. So before
the first forward of a step all buffers are copied, and after the step they are restored by the same flag that skipped
it, on the device. All of them, because nothing shows which ones a forward changes: batch-norm's kernels write through
raw pointers and do not even bump the tensor's version. They are small compared with the weights. Not covered are buffers
that do not have one number per place in memory: sparse ones (a graph's edges) and expanded views, which torch cannot
write into.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.backends.consistency import is_plain
from halfstep.engine.guards import count_registrations, num_registrations
from halfstep.events import log_warning
from halfstep.kernels.table import copied_to

__all__ = ["RESTORE_COPIES", "BufferGuard", "SavedBuffers"]

RESTORE_COPIES = 2  # of all buffers, that `restore_if` makes: as they are, and the selection; the planner counts them


@dataclass(frozen=True)
class _Saved:
    """The values of buffers of one device and dtype, in one tensor: a network has hundreds, and a launch for each would show."""

    names: list[str]
    shapes: list[torch.Size]
    flat: Tensor

    def fits(self, buffers: Sequence[Tensor | None]) -> bool:
        """Whether these are still of the shapes, dtype and device that were saved."""
        dtype, device = self.flat.dtype, self.flat.device
        return all(
            b is not None and b.shape == shape and b.dtype is dtype and b.device == device
            for b, shape in zip(buffers, self.shapes, strict=True)
        )

    def parts(self, flat: Tensor) -> list[Tensor]:
        """A tensor like `flat` as one view per buffer, in its shape."""
        views = torch.split(flat, [shape.numel() for shape in self.shapes])
        return [view.view(shape) for view, shape in zip(views, self.shapes, strict=True)]


SavedBuffers = Sequence[_Saved]


class BufferGuard:
    """Copies of a model's buffers, and how to restore them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tables, self._registered = _tables(model), count_registrations(model)
        self._saved: list[_Saved] | None = None

    @torch.no_grad()
    def save(self) -> None:
        """Copy the buffers; does nothing if this step has already begun."""
        if self._saved is None:
            self._saved = _copies(self.named())

    @property
    def copies(self) -> list[Tensor]:
        """The copies of this step, if it has begun."""
        return [saved.flat for saved in self._saved or ()]

    @torch.no_grad()
    def restore_if(self, found_inf: Tensor) -> None:
        """Restore the buffers if the flag is not 0, without reading it."""
        groups, self._saved = self._saved or [], None
        buffers = self.named() if groups else {}
        for saved in groups:
            now = [buffers.get(name) for name in saved.names]
            if saved.fits(now):
                present: list[Tensor] = now  # type: ignore[assignment]
                skip = copied_to(found_inf, saved.flat.device) != 0
                torch._foreach_copy_(present, saved.parts(torch.where(skip, saved.flat, _flatten(present))))
                continue
            for name, before, buffer in zip(saved.names, saved.parts(saved.flat), now, strict=True):
                if buffer is not None:
                    _restore_one(name, before, buffer, found_inf)

    @property
    def start(self) -> SavedBuffers:
        """The values that this step started with, if it has begun."""
        return self._saved or ()

    @torch.no_grad()
    def copies_of(self, modules: Container[str]) -> SavedBuffers:
        """Copies of the buffers of some modules, by their names."""
        return _copies({name: b for name, b in self.named().items() if name.rpartition(".")[0] in modules})

    @torch.no_grad()
    def load(self, values: SavedBuffers) -> None:
        """Write saved values into the buffers; the copies stay. One that has another shape or dtype now is replaced."""
        buffers = self.named() if values else {}
        for saved in values:
            for name, before in zip(saved.names, saved.parts(saved.flat), strict=True):
                buffer = buffers.get(name)
                if buffer is not None and buffer.shape == before.shape and buffer.dtype is before.dtype:
                    buffer.copy_(before)
                elif buffer is not None:
                    module, _, own = name.rpartition(".")
                    self._model.get_submodule(module)._buffers[own] = before.clone()  # noqa: SLF001

    def tables(self) -> Iterator[tuple[str, dict[str, Tensor | None]]]:
        """The modules that have buffers: their names and their own tables."""
        if self._registered != num_registrations():
            self._tables, self._registered = _tables(self._model), count_registrations(self._model)
        return ((prefix, table) for prefix, table in self._tables if table)

    def named(self) -> dict[str, Tensor]:
        """The buffers that are saved and restored, by their names."""
        own = ((prefix, *item) for prefix, table in self.tables() for item in table.items())
        # A buffer that two modules share is listed once.
        buffers = {b: f"{prefix}.{name}" if prefix else name for prefix, name, b in own if b is not None}
        return {name: b for b, name in buffers.items() if is_plain(b)}

    def tensors(self) -> list[Tensor]:
        """The buffers that are saved and restored."""
        return list(self.named().values())

    def forget(self) -> None:
        """End the step without restoring anything."""
        self._saved = None


def _tables(model: nn.Module) -> list[tuple[str, dict[str, Tensor | None]]]:
    """The modules' own tables of buffers, with the modules' names."""
    return [(name, module._buffers) for name, module in model.named_modules()]  # noqa: SLF001 - named_buffers() walks over all modules


def _copies(buffers: Mapping[str, Tensor]) -> list[_Saved]:
    groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, buffer in buffers.items():
        groups.setdefault((buffer.device, buffer.dtype), {})[name] = buffer
    return [
        _Saved(list(group), [b.shape for b in group.values()], _flatten(group.values())) for group in groups.values()
    ]


def _flatten(buffers: Iterable[Tensor]) -> Tensor:
    return torch.cat([b.detach().reshape(-1) for b in buffers])


def _restore_one(name: str, before: Tensor, buffer: Tensor, found_inf: Tensor) -> None:
    if before.shape != buffer.shape or before.dtype != buffer.dtype:
        log_warning(f"Buffer {name} changed its shape or dtype and cannot be restored if this step is skipped.")
        return
    skip = copied_to(found_inf, buffer.device) != 0
    buffer.copy_(torch.where(skip, before.to(buffer.device), buffer))
