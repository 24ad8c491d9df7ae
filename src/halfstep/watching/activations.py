"""Exponents of activations: forward hooks on leaf modules, for the steps that are sampled only.

A hook does no more than remember its module's output; once 512 MiB are waiting, or the window ends, they are counted in one go.
Outputs are mostly saved for backward anyway, so this costs little memory. The kernel's tables depend on the shapes, which repeat from
sample to sample, so each of these counts keeps its own: to build them took longer than to count (H200, ViT-L/16: 36 ms of 141). A module whose output is changed in place afterwards
(by an inplace ReLU) is recognised by the version of the tensor and from the next sample on counted inside its hook.

Not counted: forwards without gradients (validation), forwards that run again inside backward (activation checkpointing), dropout, whose
output is its input with zeros, and modules that return their input. Hooks on modules that torch.compile has compiled either never run or are traced into the graph, so those
modules get none, and `missing` reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from halfstep.kernels.exponents import LARGEST, count_exponents
from halfstep.kernels.table import copied_to
from halfstep.precision.formats import format_name
from halfstep.watching.cost import DeviceClock

__all__ = ["ActivationTable", "Activations"]

_WAITING_BYTES = 512 * 2**20


@dataclass(frozen=True)
class ActivationTable:
    """The counts of a sample's activations, on the device: a row of `kernels.exponents` per module."""

    names: tuple[str, ...]
    numels: tuple[int, ...]
    dtypes: tuple[str, ...]
    table: Tensor
    clocks: tuple[DeviceClock, ...] = ()


@dataclass(frozen=True)
class _Output:
    name: str
    tensor: Tensor
    version: int


class Activations:
    """Counts the outputs of a module's leaves between `arm` and `take`."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._handles: list[Any] = []
        self._waiting: list[_Output] = []
        self._tables: list[tuple[list[str], Tensor]] = []
        self._kernel_tables: list[
            dict[Any, Any]
        ] = []  # of the counts of a sample, in their order; kept for the next one
        self._numels: dict[str, int] = {}
        self._dtypes: dict[str, str] = {}
        self._clocks: list[DeviceClock] = []
        self._changed_in_place: set[str] = set()
        self._num_compiled = self._num_hooked = 0
        self.is_paused = False  # while a step is computed again, for an autopsy
        self._has_fired = False  # in this sample

    def arm(self) -> None:
        """Put the hooks on, unless they are."""
        if self._handles:
            return
        self._clear()
        self._num_compiled = 0
        for name, module, is_compiled in _leaves(self._root):
            if is_compiled:
                self._num_compiled += 1
            else:
                self._handles.append(module.register_forward_hook(self._hook(name)))
        self._num_hooked = len(self._handles)

    def disarm(self) -> None:
        """Take the hooks off and forget what they have."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._clear()

    def take(self) -> ActivationTable | None:
        """The counts since `arm`, if there are any; the hooks are removed."""
        self._flush()
        tables, dtypes, clocks, fired = self._tables, self._dtypes, tuple(self._clocks), self._has_fired
        numels = {name: numel for name, numel in self._numels.items() if numel}
        self.disarm()
        self._has_fired = fired
        if not tables:
            return None
        names = tuple(numels)
        rows = torch.cat([copied_to(table, tables[0][1].device) for _, table in tables])
        order = [names.index(name) for members, _ in tables for name in members]
        return ActivationTable(
            names,
            tuple(numels.values()),
            tuple(dtypes[name] for name in names),
            _combine(rows, order, len(names)),
            clocks,
        )

    def missing(self) -> str | None:
        """Why activations of the last sample are missing or incomplete, in a sentence; None if nothing is known to be."""
        total = self._num_compiled + self._num_hooked
        if self._num_compiled:
            return (
                f"{self._num_compiled} of {total} modules are compiled, and hooks on their inner modules would not run."
            )
        if self._num_hooked and not self._has_fired:
            return "No forward hook ran in a sampled step: the model is compiled, or its modules were not called."
        return None

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if torch.compiler.is_compiling() or self.is_paused:  # when it is traced, the graph must not change
                return
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - not inside backward
                with (
                    _disable_current_modes()
                ):  # counting is no part of what modes such as selective checkpointing record
                    # An in-place module returns its input too, with other values.
                    self._add(name, () if getattr(module, "inplace", False) else args, output)

        return hook

    def _add(self, name: str, args: tuple[Any, ...], output: Any) -> None:
        self._has_fired = True
        inputs = {id(a) for a in args}
        for value in tree_leaves(output):
            if (
                not isinstance(value, Tensor)
                or not value.is_floating_point()
                or id(value) in inputs
                or not value.numel()
            ):
                continue
            self._numels[name] = self._numels.get(name, 0) + value.numel()
            self._dtypes.setdefault(name, format_name(value.dtype))
            self._waiting.append(_Output(name, value.detach(), value._version))  # noqa: SLF001 - detach shares it
        waiting = sum(o.tensor.numel() * o.tensor.element_size() for o in self._waiting)
        if name in self._changed_in_place or waiting >= _WAITING_BYTES:
            self._flush()

    @torch.no_grad()
    def _flush(self) -> None:
        intact = [o for o in self._waiting if o.tensor._version == o.version]  # noqa: SLF001
        self._changed_in_place |= {o.name for o in self._waiting} - {o.name for o in intact}
        for output in self._waiting:
            if output.tensor._version != output.version:  # noqa: SLF001
                self._numels[output.name] -= output.tensor.numel()
        self._waiting = []
        if intact:
            with torch.autocast(intact[0].tensor.device.type, enabled=False):
                clock = DeviceClock(intact[0].tensor.device)
                if len(self._tables) == len(self._kernel_tables):
                    self._kernel_tables.append({})
                counts = count_exponents([o.tensor for o in intact], None, self._kernel_tables[len(self._tables)])
                clock.stop()
            self._clocks.append(clock)
            self._tables.append(([o.name for o in intact], counts.table))

    def _clear(self) -> None:
        self._waiting, self._tables, self._numels, self._dtypes, self._has_fired = [], [], {}, {}, False
        self._clocks = []


def _leaves(root: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """The modules to count, which have no children, their names, and whether torch.compile has compiled them or one around them."""

    def visit(name: str, module: nn.Module, compiled: bool) -> Iterator[tuple[str, nn.Module, bool]]:
        compiled |= getattr(module, "_compiled_call_impl", None) is not None
        compiled |= isinstance(module, torch._dynamo.OptimizedModule)  # noqa: SLF001 - no public name before torch 2.10
        children = list(module.named_children())
        if not children and not isinstance(module, nn.modules.dropout._DropoutNd):  # noqa: SLF001 - the class of all of them
            yield name or "model", module, compiled
        for child, inner in children:
            yield from visit(f"{name}.{child}" if name else child, inner, compiled)

    modules = set()
    for name, module, compiled in visit("", root, compiled=False):
        if module not in modules:  # shared ones have one name
            modules.add(module)
            yield name, module, compiled


def _combine(rows: Tensor, order: list[int], count: int) -> Tensor:
    """One row per module: counts add up, extremes are maxima."""
    if order == list(range(count)):
        return rows
    index = torch.tensor(order, dtype=torch.int64)
    index = index.pin_memory().to(rows.device, non_blocking=True) if rows.device.type == "cuda" else index
    combined = torch.zeros((count, rows.shape[1]), dtype=rows.dtype, device=rows.device)
    combined[:, :LARGEST].index_add_(0, index, rows[:, :LARGEST])
    extremes = rows[:, LARGEST:]
    combined[:, LARGEST:] = combined[:, LARGEST:].scatter_reduce(
        0, index[:, None].expand_as(extremes), extremes, "amax"
    )
    return combined
