"""Follows the lifetime of every tensor's memory through a step that runs on fake tensors.

How it works. A fake tensor has a shape, a dtype and a storage size but no data, so a whole training step runs in seconds
and allocates nothing. Lifetimes are real: autograd saves the same tensors for the backward pass and releases them in the
same order as on a GPU. The tracer is a dispatch mode, below autograd and autocast. An operation that returns a new storage
is an allocation; a weak reference to the storage reports when the last tensor that uses it is gone. Storages, not tensors,
because views share them.

Every block gets a category and the module that was running. Some categories are known only later: what is alive when the
forward pass ends is an activation, the rest of the forward pass was temporary, and what became a parameter's `.grad` is a
gradient. So they are assigned when the ledger is written.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.planning.integers import Integers
from halfstep.planning.ledger import Event

__all__ = ["Tracer"]

_EVEN_CHANCE = 0.5  # above any rate at which layers are dropped, so that all of them run
_ELSEWHERE = -1  # block number of storages that the ledger lists apart from the step's events
Workspace = Callable[[Any, Any, Any, Any], Mapping[str, int]]  # bytes by category


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records allocations and frees; `workspace` gives the scratch memory of kernels."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace = workspace
        self.integers = Integers()
        self._blocks: dict[int, int] = {}  # live storage -> block
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._weights: set[int] = set()  # storages of parameters, whose casts autocast caches
        self._categories: dict[int, str] = {}
        self._num_blocks = 0
        self.events: list[Event] = []
        self.phase = ""
        self._modules: list[str] = []
        self._names: dict[int, str] = {}

    # --- before the step --------------------------------------------------------------------------------------------

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Record nothing for these tensors: they are counted elsewhere."""
        for tensor in tensors:
            self._blocks[_key(tensor)] = _ELSEWHERE
            self._refs.setdefault(_key(tensor), weakref.ref(tensor.untyped_storage()))

    def ignore_model(self, model: nn.Module) -> None:
        """Record nothing for a model's parameters and buffers, and learn its modules' names."""
        self.ignore([*model.parameters(), *model.buffers()])
        self._weights = {_key(p) for p in model.parameters()}
        self._names = {id(module): name for name, module in model.named_modules()}

    # --- while the step runs ----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.rand.default and not args[0]:
            # Stochastic depth: `if torch.rand([]) < rate`. The one random number whose value must be known.
            return torch.tensor(_EVEN_CHANCE)
        if func.namespace == "prim":  # queries about a tensor, three for each operation
            return func(*args, **(kwargs or {}))
        out = self.integers.run(func, args, kwargs or {})
        scratch = self._workspace(func, args, kwargs or {}, out)  # empty if no rule covers the operation
        new = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and _key(t) not in self._blocks]
        for tensor in new:
            category = ""
            if func is torch.ops.aten._to_copy.default and _key(args[0]) in self._weights:  # noqa: SLF001
                category = "cast cache"
            self._allocated(tensor, category)
        self.scratch(scratch)
        return out

    def _allocated(self, tensor: Tensor, category: str = "") -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if tensor.numel() == 0 or key in self._blocks:
            return
        block = self._new_block()
        self._blocks[key] = block
        if category:
            self._categories[block] = category
        self.events.append(self._event(block, storage.nbytes(), category))

        def on_free(_: object) -> None:
            self._freed(key)

        self._refs[key] = weakref.ref(storage, on_free)

    def _event(self, block: int, num_bytes: int | None, category: str = "") -> Event:
        return Event(block, num_bytes, category, self._modules[-1] if self._modules else "", self.phase)

    def _new_block(self) -> int:
        self._num_blocks += 1
        return self._num_blocks - 1

    def scratch(self, sizes: Mapping[str, int]) -> None:
        """Record memory, by category, that a kernel allocates and frees again; 0 too, as other batch sizes have an event there."""
        blocks = [self._new_block() for _ in sizes]
        self.events += [self._event(b, size, name) for b, (name, size) in zip(blocks, sizes.items(), strict=True)]
        self.events += [self._event(b, None) for b in blocks]

    def _freed(self, key: int) -> None:
        block = self._blocks.pop(key, _ELSEWHERE)
        self._refs.pop(key, None)
        if block != _ELSEWHERE:
            self.events.append(self._event(block, None))

    @contextlib.contextmanager
    def modules(self) -> Iterator[None]:
        """Inside this block, record which module is running."""

        def enter(module: nn.Module, _: Any) -> None:
            self._modules.append(self._names.get(id(module), type(module).__name__))

        def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
            self._modules.pop()

        hooks = (
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # --- afterwards -------------------------------------------------------------------------------------------------

    def mark(self, tensors: Iterable[Tensor], category: str) -> None:
        """Set the category of these live tensors."""
        for tensor in tensors:
            block = self._blocks.get(_key(tensor), _ELSEWHERE)
            if block != _ELSEWHERE:
                self._categories[block] = category

    def end_forward(self) -> None:
        """What is alive now and has no other category is saved for the backward pass."""
        for block in self._blocks.values():
            if block != _ELSEWHERE:
                self._categories.setdefault(block, "activations")

    def categorized(self) -> tuple[Event, ...]:
        """The events with all categories known."""
        done = []
        allocated = {event.block for event in self.events if event.num_bytes is not None}
        for event in self.events:
            if event.block not in allocated:  # freed, but its allocation was removed from the events
                continue
            category = event.category
            if event.num_bytes is not None:
                # A module that runs in the backward pass is one that activation checkpointing recomputes.
                recomputed = event.phase == "backward" and event.module
                category = self._categories.get(event.block) or category
                category = category or ("activations" if recomputed else "temporaries")
            done.append(replace(event, category=category))
        return tuple(_in_order(done))

    def stop(self) -> None:
        """Stop following storages."""
        self._blocks.clear()
        self._refs.clear()


def _in_order(events: list[Event]) -> Iterator[Event]:
    """The same events with each run of frees sorted: autocast clears its cache in the order of addresses, which is random."""
    for is_free, run in itertools.groupby(events, key=lambda event: event.num_bytes is None):
        listed = list(run)
        yield from sorted(listed, key=lambda event: event.block) if is_free else listed


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - the address of the C++ object, as torch's own trackers use
    return key
