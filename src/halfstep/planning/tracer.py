"""Follows the life of every tensor's memory through a step that runs on fake tensors.

How it works. A fake tensor has a shape, a dtype and a storage of some size, and no numbers, so a whole training step
runs in seconds and allocates nothing. What it leaves is exactly what is wanted: autograd saves the same tensors for
the backward pass and lets go of them in the same order as it would on a GPU. The tracer sits in torch's dispatcher, below autograd
and autocast. Each operation that returns a storage not seen before is an allocation; a weak reference to the storage tells when
the last tensor that uses it is gone. Storages, not tensors, because views share them.

Every block gets a cause and the module that was running. Some causes are known only afterwards: what is alive when the
forward pass ends is an activation, the rest of the forward was temporary, and what became a parameter's `.grad` is a
gradient. So they are settled when the ledger is written.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.planning.integers import Integers
from halfstep.planning.ledger import Entry

__all__ = ["Tracer"]

_EVEN_CHANCE = 0.5  # above any rate at which layers are dropped, so that all of them run
Workspace = Callable[[Any, Any, Any, Any], Mapping[str, int]]  # bytes by cause


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that writes down allocations and frees; `workspace` says what kernels take on the side."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace = workspace
        self.integers = Integers()
        self._numbers: dict[int, int] = {}  # storage -> block, of the living
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._casts: set[int] = set()  # storages of parameters, whose casts go to the cache
        self._causes: dict[int, str] = {}
        self._blocks = 0  # so far
        self.lines: list[Entry] = []
        self.phase = ""
        self._modules: list[str] = []
        self._names: dict[int, str] = {}

    # --- what is there before -----------------------------------------------------------------------------------

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Take these tensors as given: they are accounted for elsewhere."""
        for tensor in tensors:
            self._numbers[_key(tensor)] = -1
            self._refs.setdefault(_key(tensor), weakref.ref(tensor.untyped_storage()))

    def know_weights(self, model: nn.Module) -> None:
        """Take a model's parameters and buffers as given, and learn its modules' names."""
        self.know([*model.parameters(), *model.buffers()])
        self._casts = {_key(p) for p in model.parameters()}
        self._names = {id(module): name for name, module in model.named_modules()}

    # --- while the step runs ------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.rand.default and not args[0]:
            # Stochastic depth: `if torch.rand([]) < rate`. The one tensor whose number can be told beforehand.
            return torch.tensor(_EVEN_CHANCE)
        if func.namespace == "prim":  # questions about a tensor, three for each operation
            return func(*args, **(kwargs or {}))
        out = self.integers.run(func, args, kwargs or {})
        scratch = self._workspace(func, args, kwargs or {}, out)  # empty where no rule knows the operation
        new = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and _key(t) not in self._numbers]
        for tensor in new:
            cause = ""
            if func is torch.ops.aten._to_copy.default and _key(args[0]) in self._casts:  # noqa: SLF001
                cause = "cast cache"
            self._take(tensor, cause)
        self.scratch(scratch)
        return out

    def _take(self, tensor: Tensor, cause: str = "") -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if tensor.numel() == 0 or key in self._numbers:
            return
        block = self._number()
        self._numbers[key] = block
        if cause:
            self._causes[block] = cause
        self.lines.append(self._entry(block, storage.nbytes(), cause))

        def gone(_: object) -> None:
            self._gone(key)

        self._refs[key] = weakref.ref(storage, gone)

    def _entry(self, block: int, num_bytes: int | None, cause: str = "") -> Entry:
        return Entry(block, num_bytes, cause, self._modules[-1] if self._modules else "", self.phase)

    def _number(self) -> int:
        self._blocks += 1
        return self._blocks - 1

    def scratch(self, taken: Mapping[str, int]) -> None:
        """A kernel takes this much, by cause, and gives it back at once; 0 too, as other batch sizes have a line there."""
        blocks = [self._number() for _ in taken]
        self.lines += [self._entry(b, size, cause) for b, (cause, size) in zip(blocks, taken.items(), strict=True)]
        self.lines += [self._entry(b, None) for b in blocks]

    def _gone(self, key: int) -> None:
        block = self._numbers.pop(key, -1)
        self._refs.pop(key, None)
        if block >= 0:
            self.lines.append(self._entry(block, None))

    @contextlib.contextmanager
    def modules(self) -> Iterator[None]:
        """Know which module is running, inside this block."""

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

    # --- afterwards ---------------------------------------------------------------------------------------------

    def mark(self, tensors: Iterable[Tensor], cause: str) -> None:
        """Say what these living tensors are for."""
        for tensor in tensors:
            block = self._numbers.get(_key(tensor), -1)
            if block >= 0:
                self._causes[block] = cause

    def end_forward(self) -> None:
        """What is alive now and has no other cause is kept for the backward pass."""
        for block in self._numbers.values():
            if block >= 0:
                self._causes.setdefault(block, "activations")

    def settled(self) -> tuple[Entry, ...]:
        """The lines with all causes known."""
        done = []
        taken = {line.block for line in self.lines if line.num_bytes is not None}
        for line in self.lines:
            if line.block not in taken:  # given back, but its taking was crossed out
                continue
            cause = line.cause
            if line.num_bytes is not None:
                # A module that runs in the backward pass is one that activation checkpointing computes again.
                recomputed = line.phase == "backward" and line.module
                cause = self._causes.get(line.block) or cause or ("activations" if recomputed else "temporaries")
            done.append(Entry(line.block, line.num_bytes, cause, line.module, line.phase))
        return tuple(_in_order(done))

    def stop(self) -> None:
        """Watch no storage any more."""
        self._numbers.clear()
        self._refs.clear()


def _in_order(lines: list[Entry]) -> Iterator[Entry]:
    """The same lines with each run of frees sorted: autocast drops its cache in the order of addresses, which is chance."""
    for frees, run in itertools.groupby(lines, key=lambda line: line.num_bytes is None):
        listed = list(run)
        yield from sorted(listed, key=lambda line: line.block) if frees else listed


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - the address of the C++ object, as torch's own trackers use
    return key
