"""Errors of block-scaled formats on the tensors of a step, summed on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.kernels.blockscaled.rounding import BLOCK_FORMATS

__all__ = ["BlockError", "BlockSums", "block_errors"]

Key = tuple[str, str]


@dataclass(frozen=True)
class BlockError:
    """What a block-scaled format does to the elements of a tensor, by emulation."""

    error: float  # relative L2 error; NaN if the tensor has a non-finite element
    flushed: float  # share of the non-zero elements that become 0


class BlockSums:
    """For each tensor: its sum of squares, its number of non-zero elements, and per format the squared error and what became 0."""

    def __init__(self) -> None:
        self._sums: dict[Key, Tensor] = {}

    @torch.no_grad()
    def add(self, key: Key, tensor: Tensor) -> None:
        """Emulate each format on one tensor."""
        x = tensor.detach().to(torch.float32)
        wide = x.double()
        parts = [wide.square().sum(), (x != 0).sum().double()]
        for emulate in BLOCK_FORMATS.values():
            y = emulate(x)
            parts += [(y.double() - wide).square().sum(), ((y == 0) & (x != 0)).sum().double()]
        sums = torch.stack(parts)
        self._sums[key] = sums if key not in self._sums else self._sums[key] + sums

    def on_host(self) -> dict[Key, list[float]]:
        """The sums by tensor; one copy from the device."""
        keys = list(self._sums)
        return dict(zip(keys, torch.stack([self._sums[k] for k in keys]).tolist(), strict=True)) if keys else {}


def block_errors(sums: Mapping[Key, list[float]], keys: Iterable[Key]) -> dict[str, BlockError]:
    """The errors of some tensors together, by format; empty if none was sampled."""
    chosen = [sums[key] for key in keys if key in sums]
    if not chosen:
        return {}
    squares, nonzero, *rest = (sum(column) for column in zip(*chosen, strict=True))
    return {
        name: BlockError(math.sqrt(_ratio(rest[2 * i], squares)), _ratio(rest[2 * i + 1], nonzero))
        for i, name in enumerate(BLOCK_FORMATS)
    }


def _ratio(part: float, total: float) -> float:
    return part / total if total else 0.0
