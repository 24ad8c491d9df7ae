"""Output layers whose width is not a multiple of eight, computed at the next one that is.

Tensor cores read 16-bit matrices in pieces of 16 bytes. With most vocabularies (GPT-2's 50257, BERT's 30522, Whisper's 51865)
the rows of the logits start between such pieces, and cuBLAS falls back to kernels that load fewer elements at a time: of a step of
GPT-2 medium on an H200, the three products of the output layer took 20.6 of 66.5 ms. torch.compile pads what it compiles, and
its three products took 3.2 ms; eager code does not, nor the output layer of a model with `compile="blocks"`.

Here the weight of such a layer is padded with zeros, for the time of a product:

    forward     y = x pad(W)^T, of which the first columns are returned, contiguous as nn.Linear gives them
    backward    dx = pad(dy) pad(W),  dW = the first rows of pad(dy)^T x

These are the same sums of the same products. They cost copies of the weight and of the logits, so small products run as they are.
So do layers that are not plain, or not on a CUDA device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from halfstep.engine.region.forwards import bind_forward, unbind_forward
from halfstep.engine.region.gradients import can_differentiate
from halfstep.hardware.units import few
from halfstep.precision.formats import DTYPES_16_BIT
from halfstep.precision.policy import Policy

__all__ = ["align_outputs", "aligned_row", "on_every_device"]

MULTIPLE = 8  # 16-bit elements in 16 bytes
LARGE = (
    2**34
)  # multiplications of a product; an estimate of where the copies and their launches take as long as they save
MOST_ROWS = 2**16  # of x: a layer whose weight is so small that more would be needed is left alone
_INNER = "_halfstep_unaligned"  # what `bind_forward` stores in a layer
_RAN = "_halfstep_aligned"  # an attribute of layers that have run so
_PLAIN = (Tensor, nn.Parameter, FakeTensor)

_devices = {"cuda"}


@contextlib.contextmanager
def on_every_device() -> Iterator[None]:
    """Inside this block CPU tensors count as CUDA tensors: for the planner's fake ones, and for tests."""
    before = set(_devices)
    _devices.add("cpu")
    try:
        yield
    finally:
        _devices.intersection_update(before)


def align_outputs(model: nn.Module, policy: Policy, undo: contextlib.ExitStack) -> None:
    """Let the linear layers of other widths compute at a multiple of eight; `undo` reverts it."""
    for layer in _layers(model, policy):
        bind_forward(layer, _forward, _INNER)
        undo.callback(_restore, layer)


def _restore(layer: nn.Linear) -> None:
    unbind_forward(layer, _INNER)
    vars(layer).pop(_RAN, None)


def aligned_row(model: nn.Module) -> dict[str, str]:
    """The row of the truth table: the layers that have computed so."""
    widths = {name: layer.out_features for name, layer in model.named_modules() if _RAN in vars(layer)}
    texts = [f"{name or 'the model'} {width} as {_aligned(width)}" for name, width in widths.items()]
    return {"aligned widths": few(texts)} if texts else {}


def _layers(model: nn.Module, policy: Policy) -> list[nn.Linear]:
    """The layers that can have large products of a width that is not aligned."""
    return [
        module
        for name, module in model.named_modules()
        if policy.compute in {"bf16", "fp16"}
        and isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and module.out_features % MULTIPLE
        and module.in_features % MULTIPLE == 0
        and module.out_features * module.in_features >= LARGE // MOST_ROWS
        and not policy.computes_fp32(name)
    ]


def _aligned(width: int) -> int:
    return -(-width // MULTIPLE) * MULTIPLE


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    """What nn.Linear computes, in the dtype of the region."""
    dtype = _dtype(layer, x)
    if dtype is None:
        return F.linear(x, layer.weight, layer.bias)
    vars(layer)[_RAN] = True
    y: Tensor = AlignedLinear.apply(x.to(dtype), layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return y


def _dtype(layer: nn.Linear, x: Tensor) -> torch.dtype | None:
    """The 16-bit dtype of a product that gains from alignment; None for any other."""
    weight = layer.weight
    if torch.compiler.is_compiling() or x.device.type not in _devices or weight.device != x.device:
        return None
    if x.numel() * weight.shape[0] < LARGE or type(x) not in _PLAIN or type(weight) not in _PLAIN:
        return None
    if not can_differentiate() or forward_ad._current_level >= 0:  # noqa: SLF001 - torch has no public question
        return None
    autocasts = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocasts else x.dtype
    same = autocasts or weight.dtype is x.dtype  # outside of a region, torch explains what is wrong
    return dtype if dtype in DTYPES_16_BIT and same and x.dtype in (torch.float32, *DTYPES_16_BIT) else None


class AlignedLinear(torch.autograd.Function):
    """nn.Linear in 16 bits at an aligned width; only what nn.Linear saves is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product, without the columns of zeros."""
        ctx.save_for_backward(x, weight)
        y = F.linear(x, _pad_rows(weight, x.dtype), None if bias is None else _pad_rows(bias, x.dtype))
        return y[..., : len(weight)].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients that are needed."""
        x, weight = ctx.saved_tensors
        width, to_x, to_weight, to_bias = len(weight), None, None, None
        flat = grad.reshape(-1, width)
        wide = F.pad(flat, (0, _aligned(width) - width))
        if ctx.needs_input_grad[0]:
            to_x = (wide @ _pad_rows(weight, x.dtype)).view_as(x)
        if ctx.needs_input_grad[1]:
            to_weight = (wide.t() @ x.reshape(-1, x.shape[-1]))[:width].to(weight.dtype)
        if ctx.needs_input_grad[2]:
            to_bias = flat.sum(0)
        return to_x, to_weight, to_bias


def _pad_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight or bias in 16 bits, with rows of zeros up to a multiple of eight."""
    missing = _aligned(len(weight)) - len(weight)
    return F.pad(weight.to(dtype), (0, 0) * (weight.dim() - 1) + (0, missing))
