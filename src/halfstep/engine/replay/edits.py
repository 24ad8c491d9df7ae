"""What a loop writes into buffers between the micro-batches of a window, for a replay.

A replay computes the micro-batches of a window one after the other, so a buffer that only forwards change follows by itself.
A loop that sets a temperature or resets a counter in between changes what the next forward computes. torch counts the writes to
a tensor: those that happen between two forwards are noticed without reading it, and the buffers of the module concerned are
copied. Batch norm's kernels do not count theirs, but each of its forwards counts itself in `num_batches_tracked`. Writes through
`.data` are not counted either, and nothing else shows them.
"""

from __future__ import annotations

from torch import Tensor

from halfstep.engine.buffers import BufferGuard, SavedBuffers

__all__ = ["BufferEdits"]

_Versions = dict[str, tuple[tuple[int, int], ...]]  # by module


class BufferEdits:
    """Compares the buffers at the start of a forward with those that the forward before left."""

    def __init__(self, buffers: BufferGuard) -> None:
        self._buffers = buffers
        self._left: _Versions | None = None
        self._objects: list[Tensor | None] = []  # referenced, so that no other buffer gets the identity of one

    def leave(self) -> None:
        """A forward has ended."""
        self._left = self._versions()
        self._objects = [b for _, table in self._buffers.tables() for b in table.values()]

    def forget(self) -> None:
        """The window has ended."""
        self._left, self._objects = None, []

    def changed_modules(self) -> set[str]:
        """The names of the modules with buffers that were written to, or replaced, since a forward of this window ended."""
        if self._left is None:
            return set()
        now, left = self._versions(), self._left
        return {name for name in now.keys() | left.keys() if now.get(name) != left.get(name)}

    def copies(self) -> SavedBuffers:
        """Copies of the buffers of those modules."""
        modules = self.changed_modules()
        return self._buffers.copies_of(modules) if modules else ()

    def _versions(self) -> _Versions:
        return {prefix: tuple(map(_version, table.values())) for prefix, table in self._buffers.tables()}


def _version(buffer: Tensor | None) -> tuple[int, int]:
    """The identity of a buffer and the number of writes to it."""
    if buffer is None or buffer.is_inference():  # torch writes to inference tensors in inference mode only
        return id(buffer), 0
    return id(buffer), buffer._version  # noqa: SLF001 - no public name
