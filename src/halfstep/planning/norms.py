"""RMS norm as CUDA runs it: one kernel that saves its input and one fp32 number per row.

A CPU runs the formula instead, which saves the input in fp32, its square's mean and two products. CUDA does so too where
the input and the weight have different dtypes, and for channels-last images (layer_norm.cpp of torch 2.11 to 2.13).

Group norm of a channels-last image: CUDA copies it to the default format and saves the copy; a CPU reads it as it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["fused_rms_norm", "group_norm", "rms_norm"]


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """aten::rms_norm with the kernel that CUDA would choose."""
    channels_last = x.dim() in (4, 5) and not x.is_contiguous() and x.transpose(1, -1).is_contiguous()
    if channels_last or x.is_complex() or (weight is not None and weight.dtype is not x.dtype):
        return _formula(x, shape, weight, eps)
    out: Tensor = _Fused.apply(x, weight, shape, eps)  # type: ignore[no-untyped-call]
    return out


def fused_rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - the schema's order
    """The results of the fused kernel: the output, and the reciprocal root of each row's mean square."""
    rows = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # noqa: ARG001 - the schema's
) -> Tensor:
    """aten::group_norm on an input in the default memory format, as CUDA's kernel needs it."""
    batch, channels, *rest = x.shape
    x, size = x.contiguous(), math.prod(rest)
    return torch.native_group_norm(x, weight, bias, batch, channels, size, num_groups, eps)[0]


def _formula(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    wide = x if x.is_complex() or x.element_size() > 2 else x.float()
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    root = wide.pow(2).mean(list(range(-len(shape), 0)), keepdim=True).add_(eps).rsqrt()
    out = wide * root
    return (out if weight is None else out * weight).type_as(x)


class _Fused(torch.autograd.Function):
    """The fused kernel, dispatched under its own name so that a checkpointing policy recognizes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, shape: list[int], eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - above it, torch would decompose it for a CPU
            out, root = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)  # noqa: SLF001
        ctx.save_for_backward(x, weight, root)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        grads[0].contiguous()
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None, None
