"""Buffers that a forward pass changes, restored when its step is skipped.

An overflowing forward leaves inf or NaN in batch-norm's running averages, and unlike gradients they stay. So before
the first forward of a step all buffers are copied, and after the step they are restored by the same flag that skipped
it, on the device. All of them, because nothing shows which ones a forward changes: batch-norm's kernels write through
raw pointers and do not even bump the tensor's version. They are small compared with the weights. Not covered are buffers
that do not have one number per place in memory: sparse ones (a graph's edges) and expanded views, which torch cannot
write into.
"""

from __future__ import annotations

import operator
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
class _Group:
    """Buffers of one device and dtype."""

    names: list[str]
    shapes: list[torch.Size]
    sizes: list[int]


@dataclass(frozen=True)
class _Saved:
    """The values of a group in one tensor: a network has hundreds of buffers, and a launch for each would show."""

    group: _Group
    flat: Tensor

    def fits(self, buffers: Sequence[Tensor | None]) -> bool:
        """Whether these are still of the shapes, dtype and device that were saved."""
        dtype, device = self.flat.dtype, self.flat.device
        return all(
            b is not None and b.shape == shape and b.dtype is dtype and b.device == device
            for b, shape in zip(buffers, self.group.shapes, strict=True)
        )

    def parts(self, flat: Tensor) -> list[Tensor]:
        """A tensor like `flat` as one view per buffer, in its shape."""
        views = torch.split(flat, self.group.sizes)
        return [view.view(shape) for view, shape in zip(views, self.group.shapes, strict=True)]

    def chosen(self, found_inf: Tensor, rows: list[Tensor]) -> Tensor:
        """In one tensor: the saved values if the flag is not 0, else those of these rows."""
        return torch.where(copied_to(found_inf, self.flat.device) != 0, self.flat, torch.cat(rows))


@dataclass(frozen=True)
class _Layout:
    """The buffers that a step began with, so that a later one with the same need not look for them again."""

    present: list[Tensor | None]  # in the modules' tables
    buffers: list[Tensor]  # those that are saved
    extents: list[tuple[int, int]]  # their addresses and numbers of elements
    groups: list[_Group]
    rows: list[list[Tensor]]  # of each group, as one-dimensional views


SavedBuffers = Sequence[_Saved]
_PLAIN = (Tensor, nn.Parameter)  # not the fake ones of a plan, which have no address


class BufferGuard:
    """Copies of a model's buffers, and how to restore them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tables, self._registered = _tables(model), count_registrations(model)
        self._layout: _Layout | None = None
        self._replaces = False  # whether a forward has replaced a buffer
        self._saved: list[_Saved] | None = None

    @torch.no_grad()
    def save(self) -> None:
        """Copy the buffers; does nothing if this step has already begun."""
        if self._saved is not None:
            return
        layout = self._layout
        if layout is not None and self._is_current(layout):
            self._saved = [_Saved(g, torch.cat(rows)) for g, rows in zip(layout.groups, layout.rows, strict=True)]
            return
        buffers = self.named()
        self._saved = _copies(buffers)
        # A buffer that is replaced in every forward would stay in memory until the next step.
        keep = not self._replaces and all(type(b) in _PLAIN and b.is_contiguous() for b in buffers.values())
        self._layout = self._laid_out(buffers) if keep else None

    def _laid_out(self, named: Mapping[str, Tensor]) -> _Layout:
        groups = [saved.group for saved in self._saved or ()]
        buffers = [named[name] for group in groups for name in group.names]
        rows = [_rows(named[name] for name in group.names) for group in groups]
        return _Layout(self._present(), buffers, [_extent(b) for b in buffers], groups, rows)

    def _is_current(self, layout: _Layout) -> bool:
        """Whether the modules have the same tensors, in the same memory."""
        present = self._present()
        same = len(present) == len(layout.present) and all(map(operator.is_, present, layout.present))
        return same and [_extent(b) for b in layout.buffers] == layout.extents

    @property
    def copies(self) -> list[Tensor]:
        """The copies of this step, if it has begun."""
        return [saved.flat for saved in self._saved or ()]

    @torch.no_grad()
    def restore_if(self, found_inf: Tensor) -> None:
        """Restore the buffers if the flag is not 0, without reading it."""
        groups, self._saved, layout = self._saved or [], None, self._layout
        if layout is not None and groups and self._is_current(layout):
            for saved, rows in zip(groups, layout.rows, strict=True):
                torch._foreach_copy_(rows, torch.split(saved.chosen(found_inf, rows), saved.group.sizes))
            return
        self._replaces, self._layout = self._replaces or (layout is not None and bool(groups)), None
        buffers = self.named() if groups else {}
        for saved in groups:
            now = [buffers.get(name) for name in saved.group.names]
            if saved.fits(now):
                present: list[Tensor] = now  # type: ignore[assignment]
                torch._foreach_copy_(present, saved.parts(saved.chosen(found_inf, _rows(present))))
                continue
            for name, before, buffer in zip(saved.group.names, saved.parts(saved.flat), now, strict=True):
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
            for name, before in zip(saved.group.names, saved.parts(saved.flat), strict=True):
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

    def _present(self) -> list[Tensor | None]:
        return [b for _, table in self.tables() for b in table.values()]

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


def _extent(buffer: Tensor) -> tuple[int, int]:
    return buffer.data_ptr(), buffer.numel()


def _copies(buffers: Mapping[str, Tensor]) -> list[_Saved]:
    groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, buffer in buffers.items():
        groups.setdefault((buffer.device, buffer.dtype), {})[name] = buffer
    return [_copy(group) for group in groups.values()]


def _copy(buffers: Mapping[str, Tensor]) -> _Saved:
    shapes = [b.shape for b in buffers.values()]
    return _Saved(_Group(list(buffers), shapes, [s.numel() for s in shapes]), torch.cat(_rows(buffers.values())))


def _rows(buffers: Iterable[Tensor]) -> list[Tensor]:
    return [b.detach().reshape(-1) for b in buffers]


def _restore_one(name: str, before: Tensor, buffer: Tensor, found_inf: Tensor) -> None:
    if before.shape != buffer.shape or before.dtype != buffer.dtype:
        log_warning(f"Buffer {name} changed its shape or dtype and cannot be restored if this step is skipped.")
        return
    skip = copied_to(found_inf, buffer.device) != 0
    buffer.copy_(torch.where(skip, before.to(buffer.device), buffer))
