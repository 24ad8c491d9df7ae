"""Records what an fp32 step computes: every result and its gradient, by the module whose forward computes it.

How it works. While the loss is computed, a torch function mode sees each call of a torch function, and forward hooks
maintain a stack of the modules that are running; a call belongs to the innermost one. A leaf module's operations are what
people call its output. A module with children owns what its own forward computes between the calls of its children: the sum of a
residual block, the attention logits. Module hooks alone would miss those, and fp16 overflows exactly there.

Exponents of each result are counted on the device (`kernels/exponents.py`) and added up over the steps. A hook on the result counts its
gradient in the same way. A gradient that arrives while the loss is still being computed comes from a call of
`torch.autograd.grad` in the loss (a gradient penalty): no loss scale protects it, so it has a row of its own. Where such a
gradient is differentiated again, the second derivative is counted as a gradient of the same operation.

The block looks like an autocast region to the code inside, so that models and losses behave as they will later, but each operation runs with
autocast off and gives fp32. Where the code itself has turned autocast off, its products stay in fp32 in the real run too. A call of
`torch.autograd.grad` with autocast on is the opposite case: torch then casts the products of the backward pass, even those of modules that are
kept in fp32.

Which tensor came from which operation is recorded too (`Operation.inputs`): `dtypes.py` derives from it what would be 16-bit.
"""

from __future__ import annotations

import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.kernels.exponents import LARGEST, count_exponents
from halfstep.kernels.gradstats import dense_values
from halfstep.rehearsal.blocks import BlockSums
from halfstep.rehearsal.noise import Probe
from halfstep.rehearsal.rules import FIRST, FP32, LOWER, PROMOTE, VIEW, rule_of

__all__ = [
    "ACTIVATION",
    "GRADIENT",
    "INNER",
    "INPUT",
    "KINDS",
    "LOSS",
    "ROOT",
    "UPDATE",
    "WEIGHT",
    "WEIGHT_GRADIENT",
    "Observer",
    "Operation",
]

ROOT, LOSS = "(model)", "(loss)"  # what the root's own forward computes, and what is computed outside the model
ACTIVATION, GRADIENT, INNER = "activation", "activation gradient", "inner gradient"
WEIGHT, WEIGHT_GRADIENT, UPDATE = "weight", "weight gradient", "update"
_DEVICE_TYPES = ("cpu", "cuda")
INPUT = "input"  # a tensor from outside that a product uses; counted to check its range, in no report
KINDS = (ACTIVATION, GRADIENT, INNER, WEIGHT_GRADIENT, WEIGHT, UPDATE)

Key = tuple[str, str]  # the kind, and the name of an operation or parameter


@dataclass(frozen=True)
class Operation:
    """One call of a torch function in a step; those of later steps have the same name."""

    name: str  # unique: the module, the function, and its number among those of the module
    module: str
    function: str
    rule: str
    is_leaf: bool  # whether the module has no children
    inputs: tuple[str, ...]  # the operations that computed its inputs; "" for a parameter or a tensor from outside
    params: tuple[str, ...]  # the parameters among its inputs


class Observer(TorchFunctionMode):
    """Watches the steps of one model; `observe()` is the block in which the loss is computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.operations: dict[str, Operation] = {}
        self._rows: dict[Key, Tensor] = {}
        self._numels: Counter[Key] = Counter()
        self._stack: list[str] = []
        self._calls: Counter[str] = Counter()
        self._producers: Any = WeakTensorKeyDictionary()
        self._params: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
        self._leaves: set[str] = set()
        self._handles: list[Any] = []
        self._in_loss = False
        self.casts_inner = False  # whether the loss calls torch.autograd.grad with autocast on
        self.blocks: BlockSums | None = None  # set for the step in which block-scaled formats are emulated
        self.probe: Probe | None = None  # set for a step that is not counted, but samples its gradients
        for name, module in model.named_modules():
            label = name or ROOT
            if name and not any(True for _ in module.children()):
                self._leaves.add(label)
            self._handles.append(module.register_forward_pre_hook(self._enter(label)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    @contextmanager
    def observe(self, device: torch.device) -> Iterator[None]:
        """The block in which one loss is computed."""
        self._calls.clear()
        self._producers = WeakTensorKeyDictionary()
        self._in_loss = True
        try:
            with torch.autocast(device.type, torch.float16, cache_enabled=False), self:
                # On, but with a dtype that casts nothing, where no function mode is active: a checkpoint that computes again.
                torch.set_autocast_dtype(device.type, torch.float32)
                yield
        finally:
            self._in_loss = False
            self._stack.clear()

    def count(self, kind: str, name: str, tensor: Tensor) -> None:
        """Add the elements of a tensor to the row of (kind, name)."""
        if not tensor.is_floating_point():
            return
        values = dense_values(tensor.detach())
        if not values.numel():
            return
        if self.probe is not None:
            if kind in (GRADIENT, WEIGHT_GRADIENT):
                self.probe.add((kind, name), values)
            return
        table = count_exponents([values]).table[0]
        row = self._rows.get((kind, name))
        if row is None:
            self._rows[kind, name] = table
        else:
            row[:LARGEST] += table[:LARGEST]
            torch.maximum(row[LARGEST:], table[LARGEST:], out=row[LARGEST:])
        self._numels[kind, name] += values.numel()
        if self.blocks is not None and kind != INPUT:
            self.blocks.add((kind, name), values)

    def tables(self) -> dict[Key, tuple[Any, int]]:
        """The counts of each row as a numpy array, with the number of elements; one copy from the device."""
        keys = list(self._rows)
        if not keys:
            return {}
        host = torch.stack([self._rows[key] for key in keys]).cpu().numpy()
        return {key: (host[i], self._numels[key]) for i, key in enumerate(keys)}

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._producers = WeakTensorKeyDictionary()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The block of the backward pass, in which checkpoints compute their forward again."""
        with (
            warnings.catch_warnings()
        ):  # they enter the autocast of `observe`, and torch warns about its dtype on a CPU
            warnings.filterwarnings("ignore", "In CPU autocast", UserWarning)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # Python code: its products are inside
            with self:
                return _attention_forward(*args, **kwargs)
        with _autocast_off() as was_on:
            result = func(*args, **kwargs)
            if _is_cast_to_fp32(func, args, kwargs) and any(result is arg for arg in args):
                # It would be a new tensor if the input were 16-bit; the input itself must not count as fp32 from now on.
                result = result.view_as(result)
        self.casts_inner |= func is torch.autograd.grad and was_on
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]
        if results and self._in_loss:
            name = "float" if _is_cast_to_fp32(func, args, kwargs) else getattr(func, "__name__", str(func))
            self._record(name, tree_leaves((args, kwargs)), results, casts=was_on)
        return result

    def _enter(self, label: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._stack.append(label)

        return enter

    def _leave(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()

    def _record(self, function: str, args: list[Any], results: list[Tensor], *, casts: bool) -> None:
        inputs = [t for t in args if isinstance(t, Tensor) and t.is_floating_point()]
        rule = rule_of(function, results[0].device.type)
        if not casts and function != "float":
            rule = PROMOTE
        if rule not in (LOWER, FP32):
            rule = FIRST if rule == FIRST or any(r is t for r in results for t in inputs) else rule
            if all(_shares(r, inputs) for r in results) and rule != FIRST:
                rule = VIEW
        module = self._stack[-1] if self._stack else LOSS
        self._calls[f"{module}:{function}"] += 1
        name = f"{module}:{function}#{self._calls[f'{module}:{function}']}"
        if name not in self.operations:
            producers = tuple("" if t in self._params else self._producers.get(t, "") for t in inputs)
            params = tuple(self._params[t] for t in inputs if t in self._params)
            self.operations[name] = Operation(name, module, function, rule, module in self._leaves, producers, params)
        if rule == LOWER:
            self._record_outside(name, inputs)
        for tensor in results:
            if tensor in self._params:
                continue
            self._producers[tensor] = name
            if self.probe is not None and tensor.requires_grad and not _shares(tensor, inputs):
                self.probe.disturb(tensor)
            if rule != VIEW:
                self.count(ACTIVATION, name, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_hook(name))  # type: ignore[no-untyped-call]

    def _record_outside(self, name: str, inputs: list[Tensor]) -> None:
        """Count what a product reads that no operation computed: a batch, or the input of a gradient penalty."""
        for tensor in inputs:
            if tensor not in self._params and tensor not in self._producers:
                self.count(INPUT, name, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_hook(name))  # type: ignore[no-untyped-call]

    def _gradient_hook(self, name: str) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            with torch.no_grad():
                self.count(INNER if self._in_loss else GRADIENT, name, gradient)
            if self._in_loss and gradient.requires_grad:  # create_graph=True
                gradient.register_hook(lambda second: self.count(GRADIENT, name, second))  # type: ignore[no-untyped-call]
            return None if self.probe is None else self.probe.disturbed(gradient)

        return hook


@contextmanager
def _autocast_off() -> Iterator[bool]:
    """A block with autocast off; gives whether it was on."""
    kinds = [kind for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind)]
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        yield bool(kinds)
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)


def _is_cast_to_fp32(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is `x.float()` or `x.to(torch.float32)`."""
    return func is Tensor.float or (func is Tensor.to and torch.float32 in (*args[1:], *kwargs.values()))


def _shares(result: Tensor, inputs: list[Tensor]) -> bool:
    """Whether a result has the memory of an input."""
    if result.layout is not torch.strided:
        return False
    storage = result.untyped_storage()._cdata  # noqa: SLF001 - the identity of a storage
    return any(t.layout is torch.strided and t.untyped_storage()._cdata == storage for t in inputs)  # noqa: SLF001


def _without_override(function: Any) -> Any:
    """A Python function of torch's that does not hand itself to a function mode as a whole, so that the mode sees its inside."""
    space = dict(function.__globals__)
    for check in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        space[check] = lambda *_: False
    copy = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_attention_forward = _without_override(F.multi_head_attention_forward)
