"""Ranges of tensors, measured on the device and read back once.

A probe is the smallest and the largest element of one tensor. NaN propagates to both and an infinity is one of them, so a
probe also answers whether the tensor is finite, at the cost of one read of it and no wait.

On a GPU tensors first wait: references to them are collected, and one launch measures many (`kernels/ranges/`). That is exact
only if nothing writes to them in the meantime. Who adds a tensor flushes before a write that it can see; a version counter or an
address that changed shows the others, and then `read` raises.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.ranges.ranges import decode, extent_of, launch_ranges, reference_range
from halfstep.kernels.table import Extent

__all__ = ["OverwrittenError", "Probes", "Range", "storage_of", "version_of", "view_of"]


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


class OverwrittenError(Exception):
    """A tensor was changed between its probe and the measurement: measure at once instead."""


class Probes:
    """Ranges on their way to the host; `add` returns a number by which `read` is indexed.

    With `at_once` every tensor is measured when it is added, as it also is where there are no kernels.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.storages: set[int] = set()  # of the tensors that wait
        self._at_once = at_once
        self._about: list[
            tuple[str, tuple[int, ...], str, int]
        ] = []  # dtype, shape, name and number of the measurement
        self._pairs: list[tuple[int, Tensor, Tensor]] = []  # measured one by one
        self._waiting: list[tuple[int, Tensor, Extent, int | None]] = []
        self._waiting_bytes = 0
        self._tables: list[tuple[list[int], list[torch.dtype], Tensor]] = []  # measured together
        self._num_measured = 0
        self._overwritten = False
        self._streams: dict[torch.device, int | None] = {}  # on which tensors of a device wait; None: they do not

    def add(
        self,
        tensor: Tensor,
        name: str = "",
        *,
        measured: dict[Any, int | None] | None = None,
        version: int | None = None,
        at_once: bool = False,
    ) -> int | None:
        """The probe of a tensor; None for one that has no floating-point numbers.

        `measured` is what is known of the same contents of the same storage: its dictionary is used and extended. With
        `version`, a change of the tensor before it is measured is noticed; without, the caller calls `flush` before one.
        """
        dtype = tensor.dtype
        if not (dtype.is_floating_point or dtype.is_complex) or tensor.is_meta:
            return None
        extent = extent_of(tensor)
        key = (extent or view_of(tensor), dtype)
        number = None if measured is None else measured.get(key)
        if number is None:
            number = self._measure(tensor, extent, version, at_once=at_once)
            if measured is not None:
                measured[key] = number
        if number is None:
            return None
        self._about.append((_name(dtype), tuple(tensor.shape), name, number))
        return len(self._about) - 1

    def _measure(self, tensor: Tensor, extent: Extent | None, version: int | None, *, at_once: bool) -> int | None:
        number = self._num_measured
        if extent is None or at_once or not self._can_wait(tensor.device):
            with torch.no_grad():
                pair = reference_range(tensor)
            if pair is None:
                return None
            self._pairs.append((number, *pair))
        elif not extent.numel:
            return None
        else:
            self._waiting.append((number, tensor, extent, version))
            self.storages.add(storage_of(tensor))
            self._waiting_bytes += extent.numel * tensor.itemsize
        self._num_measured += 1
        if self._waiting_bytes >= _most_waiting_bytes(tensor.device):
            self.flush()
        return number

    def _can_wait(self, device: torch.device) -> bool:
        """Whether a kernel can measure later, on the stream on which the first tensor of the device was added."""
        if self._at_once:
            return False
        if device not in self._streams:
            self._streams[device] = _stream(device) if triton_runs_on(device) else None
        home = self._streams[device]
        return home is not None and home == _stream(device)

    @torch.no_grad()
    def flush(self) -> None:
        """Measure the tensors that wait, by one launch per width of element."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self.storages.clear()
        devices: dict[torch.device, list[int]] = {}
        for index, (_, tensor, extent, version) in enumerate(waiting):
            if tensor.data_ptr() != extent.pointer or version not in {None, version_of(tensor)}:
                self._overwritten = True  # or freed: the address is not to be read
                return
            devices.setdefault(tensor.device, []).append(index)
        for device, members in devices.items():
            numbers, tensors, extents, _ = zip(*(waiting[index] for index in members), strict=True)
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                table = launch_ranges(extents, [t.itemsize for t in tensors], device)
            self._tables.append((list(numbers), [t.dtype for t in tensors], table))

    def read(self) -> list[Range]:
        """Wait for the device and read everything; OverwrittenError if a tensor changed before it was measured."""
        self.flush()
        if self._overwritten:
            raise OverwrittenError
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, (_, low, _) in enumerate(self._pairs):
            groups.setdefault((low.device, low.dtype), []).append(index)
        numbers: dict[int, tuple[float, float]] = {}
        for (device, _), members in groups.items():
            stacked = torch.stack([each for index in members for each in self._pairs[index][1:]])
            wide = stacked.float() if device.type == "mps" else stacked.double()
            values = wide.tolist()
            pairs = zip(values[::2], values[1::2], strict=True)
            numbers.update(zip((self._pairs[index][0] for index in members), pairs, strict=True))
        for device in {table.device for _, _, table in self._tables}:
            parts = [part for part in self._tables if part[2].device == device]
            table = torch.cat([part[2] for part in parts]).cpu().numpy()
            ranges = decode(table, [dtype for part in parts for dtype in part[1]])
            numbers.update(zip((number for part in parts for number in part[0]), ranges, strict=True))
        return [Range(dtype, shape, *numbers[number], name) for dtype, shape, name, number in self._about]


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, as long as the storage exists."""
    try:
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - also where it has no memory
    except (NotImplementedError, RuntimeError):  # sparse
        return -id(tensor)


def version_of(tensor: Tensor) -> int | None:
    """How often torch has written to a tensor's storage; None if it is not counted."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - no public name


def view_of(tensor: Tensor) -> tuple[Any, ...]:
    """Which elements of its storage a tensor has."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


@functools.cache
def _most_waiting_bytes(device: torch.device) -> int:
    """1/64 of a GPU's memory: what waits cannot be freed, and a launch for less costs the host more time than it saves."""
    if device.type != "cuda":
        return 1 << 29
    return int(torch.cuda.get_device_properties(device).total_memory) >> 6


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stream(device: torch.device) -> int:
    """The address of the current stream of a GPU; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))  # noqa: SLF001 - a tenth of the time of the public name
