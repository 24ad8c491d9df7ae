"""What a rehearsal recorded, on the host: the operations of a step, and the exponents of every tensor over all steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.rehearsal.blocks import BlockError
from halfstep.rehearsal.observer import ACTIVATION, GRADIENT, Operation
from halfstep.watching.stats import TensorStats

__all__ = ["Ledger", "Row"]


@dataclass(frozen=True)
class Row:
    """The tensors of one kind of one module."""

    module: str
    kind: str
    stats: TensorStats
    blocks: Mapping[str, BlockError]  # by block format, in the last step


@dataclass(frozen=True)
class Ledger:
    """The operations in the order of a step, and statistics by (kind, name of the operation or parameter)."""

    operations: Mapping[str, Operation]
    stats: Mapping[tuple[str, str], TensorStats]
    rows: tuple[Row, ...]  # by module and kind, in the order of the model
    modules: tuple[str, ...]  # the names of all modules, without the root
    casts_inner: (
        bool  # whether gradients inside the loss are computed with autocast on, in 16 bits whatever module is kept
    )

    noise: frozenset[tuple[str, str]] = frozenset()  # (kind, name) of gradients that are rounding noise in fp32 itself

    def of(self, kind: str, name: str) -> TensorStats | None:
        """The statistics of one tensor; None if there was none."""
        return self.stats.get((kind, name))

    def activation(self, name: str) -> TensorStats | None:
        """The result of an operation."""
        return self.of(ACTIVATION, name)

    def gradient(self, name: str) -> TensorStats | None:
        """The gradient of an operation's result."""
        return self.of(GRADIENT, name)

    def merged(self, kind: str, names: tuple[str, ...]) -> TensorStats | None:
        """The statistics of several tensors as one; None without any."""
        parts = [stats for name in names if (stats := self.of(kind, name)) is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        return TensorStats.merge(parts[0].name, parts)
