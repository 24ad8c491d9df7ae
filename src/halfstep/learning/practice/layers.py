"""Which module first gives inf or NaN, in which format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils._pytree import tree_leaves

from halfstep.learning.practice.memory import FORMATS
from halfstep.learning.practice.record import Layer

__all__ = ["LayerObserver"]


class LayerObserver:
    """Hooks on every module: finds those that give inf or NaN from finite inputs and finite parts."""

    def __init__(self) -> None:
        self.formats: set[str] = set()
        self._stack: list[
            tuple[nn.Module, bool, list[bool]]
        ] = []  # module, finite inputs, whether a part gave inf or NaN
        self._roots: dict[int, nn.Module] = {}
        self._culprits: dict[tuple[int, str], nn.Module] = {}

    def patch(self) -> None:
        """Observe modules from here on."""
        modules.register_module_forward_pre_hook(self._enter)
        modules.register_module_forward_hook(self._leave)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if not self._stack:
            self._roots[id(module)] = module
        self._stack.append((module, _finite(inputs), [False]))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        while self._stack:  # what an exception left behind is dropped
            entered, finite_inputs, part = self._stack.pop()
            if entered is module:
                break
        else:
            return
        compute = _compute(module)
        if any(True for _ in module.parameters()):
            self.formats.add(compute)
        if not _finite(output):
            if finite_inputs and not part[0]:
                self._culprits[id(module), compute] = module
            if self._stack:
                self._stack[-1][2][0] = True

    def culprits(self, variables: Mapping[str, Any]) -> list[Layer]:
        """The modules, by every name that the script could call them."""
        return [Layer(tuple(self._names(m, variables)), compute) for (_, compute), m in self._culprits.items()]

    def all_names(self, variables: Mapping[str, Any]) -> list[str]:
        """Names of all modules that have no parts."""
        leaves = {
            id(m): m
            for root in self._searched(variables)
            for m in root.modules()
            if not any(True for _ in m.children())
        }
        return sorted({name for m in leaves.values() for name in self._names(m, variables)})

    def _searched(self, variables: Mapping[str, Any]) -> Iterable[nn.Module]:
        own = [value for value in variables.values() if isinstance(value, nn.Module)]
        return [*self._roots.values(), *own]

    def _names(self, module: nn.Module, variables: Mapping[str, Any]) -> list[str]:
        names = {name for root in self._searched(variables) for name, m in root.named_modules() if m is module and name}
        if not names:  # a module by itself is called by its variable
            names = {name for name, value in variables.items() if value is module and not name.startswith("_")}
        return sorted(names) or [type(module).__name__]


def _finite(values: Any) -> bool:
    with torch.no_grad():
        return all(
            bool(torch.isfinite(leaf).all())
            for leaf in tree_leaves(values)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        )


def _compute(module: nn.Module) -> str:
    if torch.is_autocast_enabled("cpu"):
        return FORMATS.get(torch.get_autocast_dtype("cpu"), "fp32")
    return next((FORMATS.get(p.dtype, "fp32") for p in module.parameters()), "fp32")
