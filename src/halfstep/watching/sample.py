"""One sample of a run: statistics of gradients, weights, activations and updates at one step.

A sample travels from the device as one vector of 64-bit integers and is only unpacked here. The statistics of a tensor are computed
when they are first looked at: at every step of a model with 300 tensors that would take longer than the counting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from halfstep.kernels.exponents import INF, LARGEST, NAN, NUM_COLUMNS
from halfstep.watching.stats import TensorStats
from halfstep.watching.updates import UpdateStats

__all__ = ["Rows", "Sample", "by_module"]


@dataclass(frozen=True)
class Rows:
    """Counts of some tensors on the host, with their names."""

    names: tuple[str, ...] = ()
    numels: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    table: np.ndarray = field(default_factory=lambda: np.zeros((0, NUM_COLUMNS), dtype=np.int64), repr=False)
    divisor: float = 1.0

    def stats(self) -> dict[str, TensorStats]:
        """The statistics of each tensor, of true values: divided by the divisor."""
        return {
            name: TensorStats.from_row(name, numel, row, self.divisor)
            for name, numel, row in zip(self.names, self.numels, self.table, strict=True)
        }

    def num_nonfinite(self) -> dict[str, int]:
        """The tensors with inf or NaN, and how many elements of each."""
        counts = self.table[:, NAN : INF + 1].sum(axis=1) if len(self.names) else []
        return {name: int(count) for name, count in zip(self.names, counts, strict=True) if count}

    def largest(self) -> dict[str, float]:
        """The largest finite magnitude of each tensor, not divided by the divisor."""
        bits = self.table[:, LARGEST].astype(np.uint32).view(np.float32)
        return dict(zip(self.names, bits.tolist(), strict=True))


@dataclass(frozen=True)
class Sample:
    """Statistics of one step. `skipped` is None where nobody reports it to the watch."""

    step: int
    skipped: bool | None
    scale: float  # what the gradients were multiplied with
    gradient_rows: Rows = field(repr=False)
    weight_rows: Rows = field(repr=False)
    activation_rows: Rows = field(repr=False)
    updates: Mapping[str, UpdateStats] = field(repr=False)
    idle: frozenset[str] = field(default=frozenset(), repr=False)  # parameters whose learning rate was 0

    @cached_property
    def gradients(self) -> dict[str, TensorStats]:
        """Unscaled gradients, by parameter."""
        return self.gradient_rows.stats()

    @cached_property
    def weights(self) -> dict[str, TensorStats]:
        """Weights as stored, before the update, by parameter."""
        return self.weight_rows.stats()

    @cached_property
    def activations(self) -> dict[str, TensorStats]:
        """Outputs of the leaf modules, by module, over all micro-batches of the step."""
        return self.activation_rows.stats()


def by_module(stats: Mapping[str, TensorStats]) -> dict[str, TensorStats]:
    """Statistics of parameters added up by the module that owns them."""
    groups: dict[str, list[TensorStats]] = {}
    for name, value in stats.items():
        groups.setdefault(name.rpartition(".")[0], []).append(value)
    return {name: TensorStats.merge(name, members) for name, members in groups.items()}
