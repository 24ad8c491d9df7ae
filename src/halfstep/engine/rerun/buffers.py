"""Buffers in two runs of one forward: the second starts from the old values, and changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from halfstep.errors import SettingError

__all__ = ["Changes", "buffers_of", "old_values"]

Changes = list[tuple[nn.Module, str, Tensor]]  # module, name of a buffer, and its value before the first run


@contextlib.contextmanager
def old_values(changes: Changes) -> Iterator[None]:
    """Give buffers their old values inside this block, in copies."""
    current = [(module, name, module._buffers[name]) for module, name, _ in changes]  # noqa: SLF001
    for module, name, old in changes:
        module._buffers[name] = old.clone()  # noqa: SLF001
    try:
        yield
    finally:
        for module, name, tensor in current:
            module._buffers[name] = tensor  # noqa: SLF001


def buffers_of(block: nn.Module) -> Buffers:
    """The buffers of a block, with what earlier forwards showed."""
    buffers = _buffers.get(block)
    if buffers is None:
        buffers = _buffers[block] = Buffers(block)
    return buffers


class Buffers:
    """The buffers of a block, and which of them its forward changes."""

    def __init__(self, block: nn.Module) -> None:
        self._places = [(module, name) for module in block.modules() for name in module._buffers]  # noqa: SLF001
        self._changing: set[int] | None = None  # unknown before the first forward

    def read(self) -> list[tuple[Tensor | None, int, Tensor | None]]:
        """Each buffer, its version, and its value if a forward may change it."""
        values: list[tuple[Tensor | None, int, Tensor | None]] = []
        for index, (module, name) in enumerate(self._places):
            buffer = module._buffers[name]  # noqa: SLF001
            if buffer is None:
                values.append((None, 0, None))
                continue
            copied = buffer.clone() if self._changing is None or index in self._changing else None
            values.append((buffer, buffer._version, copied))  # noqa: SLF001
        return values

    def changes(self, before: list[tuple[Tensor | None, int, Tensor | None]]) -> Changes:
        """The old values of the buffers that changed since `before`."""
        changed = {}
        for index, ((module, name), (buffer, version, copied)) in enumerate(zip(self._places, before, strict=True)):
            now = module._buffers.get(name)  # noqa: SLF001
            if buffer is None or (now is buffer and buffer._version == version):  # noqa: SLF001
                continue
            if copied is None:
                raise SettingError(
                    f"Buffer {name} of a {type(module).__name__} was changed by a forward that did not change it at first; recompute "
                    "has no copy of its old value. Update it outside of the repeated blocks, or leave out recompute."
                )
            changed[index] = (module, name, copied)
        self._changing = (self._changing or set()) | changed.keys()
        return list(changed.values())


_buffers: WeakKeyDictionary[nn.Module, Buffers] = WeakKeyDictionary()
