"""What one step computes in, observed while it runs, without changing a bit of it.

How it works. Operators are observed below autograd and autocast, at torch's dispatcher, where tensors have the dtype that
the kernel is called with: matrix products and convolutions of the forward by module, those of the backward, and the
collectives that reduce gradients. `torch.autograd.backward` is wrapped: the graph of the loss shows what the loss was
computed in, and the gradients before and after it show their format and whether micro-batches were accumulated. Hooks of the
optimizer show whether it stepped. Nothing is computed, copied or cast, and everything is removed when the block ends.

Compiled code runs compiled: its matrix products are observed where it calls torch's operators for them, but not by module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.backends.fsdp.groups import Groups, is_sharded_model
from halfstep.engine.graph import loss_results
from halfstep.engine.replay.undisturbed import MESSAGES
from halfstep.hardware.tf32 import tf32_state
from halfstep.inspection.masters import trained_params
from halfstep.inspection.wrappers import Parts, optimizer_chain
from halfstep.optim.shards import local
from halfstep.precision.formats import format_name
from halfstep.watching.operators import is_product, operand_format
from halfstep.watching.places import Places

__all__ = ["Observer"]

_REDUCTIONS = ("allreduce", "all_reduce", "reduce_scatter", "reduce_")


class Observer:
    """Records one step; `observed()` is the block around it, and the rest is what was recorded."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._places = Places(parts.module)
        self._groups = Groups(parts.module) if is_sharded_model(parts.module) else None
        self._params = trained_params(parts)
        matrices = [local(p).numel() for p in self._params.values() if p.dim() > 1]
        self._smallest = max(2, min(matrices, default=2))  # elements of a gradient that is reduced after the backward
        self._depth, self._has_gradients = 0, False
        self._tf32 = tf32_state()
        self._flags: list[Tensor] = []
        self._num_uncalled = 0
        self.products: list[tuple[str, str]] = []  # (module, format) of the forward
        self.backward_products: list[tuple[str, str]] = []  # (operator, format)
        self.losses: list[tuple[str, str]] = []  # (operation, format)
        self.grads: dict[str, str] = {}
        self.grad_bytes = 0
        self.accumulated: dict[str, str] = {}
        self.reductions: list[tuple[str, str, int]] = []  # (operator, format, elements)
        self.num_backwards, self.num_steps = 0, 0

    @property
    def num_skips(self) -> int:
        """Steps that changed nothing because of a non-finite gradient; this waits for the device."""
        return self._num_uncalled + sum(bool(flag.item()) for flag in self._flags)

    @property
    def num_applied(self) -> int:
        """Steps that were applied; this waits for the device."""
        return self.num_steps - sum(bool(flag.item()) for flag in self._flags)

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Record what runs in this block."""
        with contextlib.ExitStack() as stack:
            self._follow_backward(stack)
            self._follow_steps(stack)
            if not self._parts.is_compiled:  # patched calls of modules would be compiled again
                stack.enter_context(self._places.followed())
            stack.enter_context(_Operators(self._record))
            yield

    # --- the optimizer and the backward -----------------------------------------------------------------------------

    def _follow_steps(self, stack: contextlib.ExitStack) -> None:
        inner = {}
        for optimizer in self._parts.optimizers:
            *_, last = optimizer_chain(optimizer)
            inner[id(last)] = last
        for optimizer in inner.values():
            register = getattr(optimizer, "register_step_pre_hook", None)
            if register is not None:
                stack.callback(register(self._before_step).remove)
        scaler = self._parts.scaler
        step = getattr(scaler, "step", None)
        if callable(step):
            own = vars(scaler).get("step")

            def counted(*args: Any, **kwargs: Any) -> Any:
                before = self.num_steps
                returned = step(*args, **kwargs)
                self._num_uncalled += self.num_steps == before  # the scaler has read the flag and skips by itself
                return returned

            scaler.step = counted
            stack.callback(_restore, scaler, "step", own)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self.num_steps += 1
        flag = getattr(optimizer, "found_inf", None)  # of the fused protocol: the kernel itself skips
        if isinstance(flag, Tensor):
            self._flags.append(flag.detach().clone())
        self._read_gradients()
        self._has_gradients = False

    def _follow_backward(self, stack: contextlib.ExitStack) -> None:
        run = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._begin_backward(tensors)
            self._depth += 1
            try:
                result = run(tensors, *args, **kwargs)
            finally:
                self._depth -= 1
            self._end_backward(before)
            return result

        torch.autograd.backward = backward
        stack.callback(_restore, torch.autograd, "backward", run)

    def _begin_backward(self, tensors: Any) -> set[str] | None:
        """The parameters that have gradients already; None inside another backward, as of a re-entrant checkpoint."""
        if self._depth:
            return None
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            if isinstance(tensor, Tensor):
                self.losses += loss_results(tensor)
        before = {name for name, param in self._params.items() if param.grad is not None}
        return before | ({""} if self._retained() else set())

    def _end_backward(self, before: set[str] | None) -> None:
        if before is None:
            return
        self.num_backwards, self._has_gradients = self.num_backwards + 1, True
        self._read_gradients()
        self.accumulated |= {name: form for name, form in self.grads.items() if name in before}
        if "" in before:  # FSDP2 without a reduction: sums of whole gradients
            self.accumulated |= {f"sum {i} of FSDP2": format_name(t.dtype) for i, t in enumerate(self._retained())}

    def _read_gradients(self) -> None:
        grads = {name: param.grad for name, param in self._params.items() if param.grad is not None}
        self.grads |= {name: format_name(grad.dtype) for name, grad in grads.items()}
        size = sum(local(grad).numel() * grad.element_size() for grad in grads.values())
        self.grad_bytes = max(self.grad_bytes, size)

    def _retained(self) -> list[Tensor]:
        return [] if self._groups is None else self._groups.retained()

    # --- operators --------------------------------------------------------------------------------------------------

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = getattr(func, "overloadpacket", None)
        if packet is None:  # a higher-order operator
            return
        namespace, _, name = str(packet).partition(".")
        if namespace in MESSAGES:
            if name.lstrip("_").startswith(_REDUCTIONS):
                self._record_reduction(name, args)
        elif is_product(name):
            self._record_product(name, [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)], result)

    def _record_reduction(self, name: str, args: Any) -> None:
        tensors = [x for x in pytree.tree_leaves(args[:2]) if isinstance(x, Tensor) and x.is_floating_point()]
        tensor = max(tensors, key=lambda x: x.numel(), default=None)
        least = 2 if self._depth else self._smallest
        if tensor is not None and tensor.numel() >= least and (self._depth or self._has_gradients):
            self.reductions.append((name.strip("_"), format_name(tensor.dtype), tensor.numel()))

    def _record_product(self, name: str, inputs: list[Tensor], result: Any) -> None:
        form = operand_format(name, inputs, result)
        if form == "fp32" and inputs[0].device.type == "cuda":
            uses_tf32 = self._tf32.conv if "conv" in name else self._tf32.matmul
            form = "tf32" if uses_tf32 else form
        if form == "other":
            return
        place = self._places.current
        # Custom autograd functions (ZeRO stage 3 has one for linear layers) and compiled code run without gradients themselves.
        is_inside = not self._depth and (place is not None or self._parts.is_compiled)
        if torch.is_grad_enabled() or is_inside:
            if self._has_weights(place) or any(x.requires_grad for x in inputs):
                where = "compiled code" if self._parts.is_compiled else "outside the model" if place is None else place
                self.products.append((f"{where or 'the model'} ({name})", form))
        elif self._depth:
            self.backward_products.append((name, form))

    def _has_weights(self, place: str | None) -> bool:
        """Whether a module has weights itself: products of constants, as of rotary tables, are not the model's compute."""
        return bool(place) and any(True for _ in self._parts.module.get_submodule(str(place)).parameters(recurse=False))


class _Operators(TorchDispatchMode):
    """Calls `record` with every operator of the block and its result."""

    supports_higher_order_operators = True

    def __init__(self, record: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._record(func, args, kwargs, result)
        return result


def _restore(owner: Any, name: str, before: Any) -> None:
    if before is None:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
