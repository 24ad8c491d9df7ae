"""One sample of a run: statistics of gradients, weights, activations and updates at one step.

A sample travels from the device as one vector of 64-bit integers and is only unpacked here. The statistics of a tensor are computed
when they are first looked at: at every step of a model with 300 tensors that would take longer than the counting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from halfstep.kernels.exponents import NUM_COLUMNS
from halfstep.watching.stats import StatsTable, TensorStats
from halfstep.watching.updates import UpdateStats

__all__ = ["Header", "Rows", "Sample", "by_module"]


@dataclass(frozen=True)
class Header:
    """Names, sizes and dtypes of the tensors that a table has rows for."""

    names: tuple[str, ...] = ()
    numels: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()

    def rows(self, table: np.ndarray, divisor: float = 1.0) -> Rows:
        """The rows that arrived; a divisor that no step can use counts as 1, as in `count_exponents`."""
        usable = math.isfinite(divisor) and divisor > 0
        numels = np.asarray(self.numels, dtype=np.int64)
        return Rows(self.names, numels, table.reshape(-1, NUM_COLUMNS), divisor if usable else 1.0, self.dtypes)


@dataclass(frozen=True, eq=False)
class Rows(StatsTable):
    """Statistics of many tensors, with their dtypes."""

    dtypes: tuple[str, ...] = ()

    def by_name(self) -> dict[str, TensorStats]:
        """The statistics of each tensor."""
        return dict(zip(self.names, self, strict=True))

    def num_nonfinite(self) -> dict[str, int]:
        """The tensors with inf or NaN, and how many elements of each."""
        return {name: count for name, count in zip(self.names, self.nonfinite.tolist(), strict=True) if count}


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
        return self.gradient_rows.by_name()

    @cached_property
    def weights(self) -> dict[str, TensorStats]:
        """Weights as stored, before the update, by parameter."""
        return self.weight_rows.by_name()

    @cached_property
    def activations(self) -> dict[str, TensorStats]:
        """Outputs of the leaf modules, by module, over all micro-batches of the step."""
        return self.activation_rows.by_name()


def by_module(stats: Mapping[str, TensorStats]) -> dict[str, TensorStats]:
    """Statistics of parameters added up by the module that owns them."""
    groups: dict[str, list[TensorStats]] = {}
    for name, value in stats.items():
        groups.setdefault(name.rpartition(".")[0], []).append(value)
    return {name: TensorStats.merge(name, members) for name, members in groups.items()}
