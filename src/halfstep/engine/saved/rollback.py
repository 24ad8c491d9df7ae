"""A load that fails half-way leaves everything as it was.

What loads a state is partly other people's code: optimizers, schedulers, modules with extra state. Whatever it can do
wrong before the first change is checked before it; this is for the rest. Only references are kept where loading
makes new tensors, as torch's and Halfstep's optimizers do; the weights are copied to the CPU, and the states of optimizers
with a `load_state_dict` of their own are cloned.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.shards import local

__all__ = ["ObjectCopy", "loads_itself", "restored_on_error"]


def loads_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's class has a `load_state_dict` of its own, which may change tensors in place."""
    known = (torch.optim.Optimizer.load_state_dict, LeanOptimizer.load_state_dict)
    return type(optimizer).load_state_dict not in known


@contextlib.contextmanager
def restored_on_error(
    module: nn.Module, optimizers: Iterable[torch.optim.Optimizer], others: Iterable[Any]
) -> Iterator[None]:
    """If this block raises, the module, the optimizers and the other objects are as they were before it."""
    weights, extra = _module_copy(module)
    copies = [ObjectCopy(o, tensors=loads_itself(o)) for o in optimizers] + [
        ObjectCopy(o, tensors=True) for o in others
    ]
    try:
        yield
    except BaseException:
        for saved in copies:
            saved.restore()
        with torch.no_grad():
            for tensor, value in weights:
                tensor.copy_(value)
        for part, value in extra:
            with contextlib.suppress(Exception):  # the one that failed may fail again; the others are restored
                part.set_extra_state(value)
        raise


def _module_copy(module: nn.Module) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[nn.Module, Any]]]:
    own = {id(t): t for t in (*module.parameters(), *module.buffers()) if t.device.type != "meta"}
    parts = [local(t.detach()) for t in own.values()]
    weights = [(part, part.to("cpu", copy=True)) for part in parts]
    extra = [
        (m, copy.deepcopy(m.get_extra_state()))
        for m in module.modules()
        if type(m).get_extra_state is not nn.Module.get_extra_state
    ]
    return weights, extra


class ObjectCopy:
    """The attributes of an object, its dicts and lists at any depth, the optimizers and schedulers in it, and its tensors."""

    def __init__(self, value: Any, *, tensors: bool) -> None:
        self._tensors = tensors
        self._dicts: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
        self._lists: dict[int, tuple[list[Any], list[Any]]] = {}
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        self._add_object(value)

    def restore(self) -> None:
        """Put everything back, in the same objects."""
        for mapping, entries in self._dicts.values():
            mapping.clear()
            mapping.update(entries)
        for sequence, items in self._lists.values():
            sequence[:] = items
        with torch.no_grad():
            for tensor, value in self._values.values():
                tensor.copy_(value)

    def _add_object(self, value: Any) -> None:
        if hasattr(value, "__dict__"):
            self._add(vars(value))

    def _add(self, value: Any) -> None:
        if isinstance(value, dict) and id(value) not in self._dicts:
            self._dicts[id(value)] = (value, dict(value))
            for item in value.values():
                self._add(item)
        elif isinstance(value, list) and id(value) not in self._lists:
            self._lists[id(value)] = (value, list(value))
            for item in value:
                self._add(item)
        elif isinstance(value, nn.Parameter):
            return  # the weights are copied once
        elif isinstance(value, Tensor):
            if self._tensors:
                self._values.setdefault(id(value), (value, value.detach().clone()))
        elif isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
            self._add_object(value)
