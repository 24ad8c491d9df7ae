"""Buffers in two runs of one forward: the second starts from the old values, and changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary, ref

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


_State = tuple[nn.Module, str, Tensor, int, Tensor | None]  # owner, name, buffer, version, old value


class Buffers:
    """The buffers of a block, and which of them its forward changes."""

    def __init__(self, block: nn.Module) -> None:
        # Weak, because this object is stored for as long as the block exists.
        self._places = [(ref(module), name) for module in block.modules() for name in module._buffers]  # noqa: SLF001
        # torch's normalisation kernels write the statistics without counting a new version of the tensors.
        self._statistics = {
            index for index, (owner, _) in enumerate(self._places) if "running_mean" in getattr(owner(), "_buffers", ())
        }
        self._changing: set[int] | None = None  # unknown before the first forward

    def read(self) -> dict[int, _State]:
        """Each buffer as it is, with a copy of its value if a forward may change it."""
        states: dict[int, _State] = {}
        for index, (owner, name) in enumerate(self._places):
            module = owner()
            buffer = None if module is None else module._buffers.get(name)  # noqa: SLF001
            if module is not None and buffer is not None:
                may_change = self._changing is None or index in self._changing or index in self._statistics
                states[index] = (module, name, buffer, buffer._version, buffer.clone() if may_change else None)  # noqa: SLF001
        return states

    def changes(self, before: dict[int, _State]) -> Changes:
        """The old values of the buffers that changed since `before`."""
        changed = {}
        for index, (module, name, buffer, version, old) in before.items():
            same = module._buffers.get(name) is buffer and buffer._version == version  # noqa: SLF001
            if same and index not in self._statistics:
                continue
            if old is None:
                raise SettingError(
                    f"Buffer {name} of a {type(module).__name__} was changed by a forward that did not change it at first; recompute "
                    "has no copy of its old value. Update it outside of the repeated blocks, or leave out recompute."
                )
            changed[index] = (module, name, old)
        self._changing = (self._changing or set()) | changed.keys()
        return list(changed.values())


_buffers: WeakKeyDictionary[nn.Module, Buffers] = WeakKeyDictionary()
