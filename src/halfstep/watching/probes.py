"""Ranges of tensors, measured on the device and read back once.

A probe is the smallest and the largest element of one tensor. NaN propagates to both and an infinity is one of them, so a
probe also answers whether the tensor is finite, at the cost of one read of it and no wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.kernels.gradstats import dense_values

__all__ = ["Probes", "Range"]


@dataclass(frozen=True)
class Range:
    """The smallest and largest element of a tensor; both NaN if it contains a NaN."""

    dtype: str  # "number" for a Python number
    shape: tuple[int, ...]
    low: float
    high: float
    name: str = ""  # what the tensor is, where that is known

    @property
    def finite(self) -> bool:
        """Whether every element is finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def value(self) -> str:
        """What is wrong with it: "nan", "inf", "-inf", or "" if nothing is."""
        if math.isnan(self.low):
            return "nan"
        return "inf" if self.high == math.inf else "-inf" if self.low == -math.inf else ""

    @property
    def largest(self) -> float:
        """The largest absolute value."""
        return max(abs(self.low), abs(self.high))

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        place = f"{self.name} " if self.name else ""
        if self.dtype == "number":
            return f"the number {self.low:.4g}"
        return f"{place}{shape} {self.dtype} in [{self.low + 0.0:.4g}, {self.high + 0.0:.4g}]"  # no -0


class Probes:
    """Measured ranges on their way to the host; `add` returns a number by which `read` is indexed."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._about: list[tuple[str, tuple[int, ...], str]] = []

    @torch.no_grad()
    def add(self, tensor: Tensor, name: str = "") -> int | None:
        """Measure a tensor; None for one that has no floating-point numbers."""
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta":
            return None
        values = dense_values(tensor.detach())
        if values.numel() == 0:
            return None
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        if values.element_size() == 1:  # fp8: no arithmetic; exact in fp32
            values = values.float()
        low, high = torch.aminmax(values)
        self._pairs.append((low, high))
        self._about.append((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), name))
        return len(self._pairs) - 1

    def read(self) -> list[Range]:
        """Wait for the device and read everything."""
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, (low, _) in enumerate(self._pairs):
            groups.setdefault((low.device, low.dtype), []).append(index)
        numbers: dict[int, tuple[float, float]] = {}
        for (device, _), members in groups.items():
            stacked = torch.stack([each for index in members for each in self._pairs[index]])
            wide = stacked.float() if device.type == "mps" else stacked.double()
            values = wide.tolist()
            numbers.update(zip(members, zip(values[::2], values[1::2], strict=True), strict=True))
        return [Range(dtype, shape, *numbers[index], name) for index, (dtype, shape, name) in enumerate(self._about)]
