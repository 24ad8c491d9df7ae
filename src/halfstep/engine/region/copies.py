"""compute_fp32: fp32 copies of a module's 16-bit weights while its forward runs.

The weights stay 16-bit parameters, possibly tied with others (a head and its embedding). For the time of one forward the
module's entries for them are fp32 tensors that autograd knows as their casts, so everything in the module, also code that
asks for `self.weight.dtype`, sees fp32. Gradients are computed in fp32 and rounded once, by the backward of the cast; where
the run stores fp32 gradients for 16-bit weights they are not rounded (in compiled code, FSDP2 and ZeRO they are). The copy
lives from the forward to the backward of the module, as its products save it: 4 bytes for each weight.

Not torch.func.functional_call: it calls the module with its hooks, so our forward would call itself. Torch's compiler
traces the exchange of entries without a break.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["fp32_weights"]


@contextlib.contextmanager
def fp32_weights(module: nn.Module) -> Iterator[None]:
    """Inside this block the 16-bit parameters of a module, and of those inside it, are fp32 copies."""
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    copies: dict[int, Tensor] = {}  # one for a tensor that two modules inside share
    recurrent: list[tuple[nn.RNNBase, list[Tensor | None]]] = []
    try:
        for inner in module.modules():
            entries: dict[str, Any] = inner._parameters  # noqa: SLF001 - what functional_call exchanges too
            for name, param in list(entries.items()):
                if _can_copy(param):
                    if id(param) not in copies:
                        copies[id(param)] = _copy(param)
                    replaced.append((entries, name, param))
                    entries[name] = copies[id(param)]
            if isinstance(inner, nn.RNNBase):  # passes a list of its weights to the kernel, not its entries
                recurrent.append((inner, inner._flat_weights))  # noqa: SLF001
                inner._flat_weights = [copies.get(id(w), w) for w in inner._flat_weights]  # noqa: SLF001
        yield
    finally:
        for entries, name, param in replaced:
            entries[name] = param
        for rnn, weights in recurrent:
            rnn._flat_weights = weights  # noqa: SLF001


def _copy(param: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or not (param.requires_grad and param.is_leaf and torch.is_grad_enabled()):
        return param.float()
    if getattr(param, "grad_dtype", param.dtype) is not torch.float32:
        return param.float()
    return _Copy.apply(param)  # type: ignore[no-untyped-call,no-any-return]


class _Copy(torch.autograd.Function):
    """An fp32 copy of a weight with `grad_dtype` fp32, whose gradient autograd passes on without rounding it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        return weight.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad


def _can_copy(param: Tensor | None) -> bool:
    """Whether a parameter has 16 bits and is here: that of a sharded module inside is not before its own forward.

    FSDP2 has a DTensor there until then, ZeRO-3 an empty tensor. Quantised weights are tensor subclasses, which only their
    own operations can read.
    """
    if param is None or param.dtype not in DTYPES_16_BIT:
        return False
    return param.numel() > 0 and not is_traceable_wrapper_subclass(param)
