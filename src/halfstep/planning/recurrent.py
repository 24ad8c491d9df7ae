"""LSTM, GRU and plain recurrent layers as cuDNN runs them: all steps in one call, with a reserve for the backward pass.

The contents of cuDNN's reserve are not documented. The sizes here were measured on an H200 with cuDNN 9.19
(benchmarks/bench_plan_parts.py), in units of the hidden states of all steps and directions of a layer:

    reserve     5 for each LSTM layer, 6 for a GRU's, 1 for a plain one's, and 1 for each layer but the last
    workspace   6, twice the weights, and 1 more with dropout or two directions; forwards and backwards

Weights must be contiguous in one buffer. Under autocast, and in bf16, which torch does not flatten, every call makes a
16-bit copy of them and saves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["RESERVE", "reserve_bytes", "run_recurrent", "workspace_bytes"]

RESERVE = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}


def reserve_bytes(kind: str, unit: int, layers: int) -> int:
    """Bytes of the reserve if the hidden states of one layer have `unit` bytes."""
    return (RESERVE[kind] * layers + layers - 1) * unit


def workspace_bytes(unit: int, weights: int, *, extra: bool) -> int:
    """Bytes of the workspace; `extra` for dropout or two directions."""
    return (6 + extra) * unit + 2 * weights


class _Recurrent(torch.autograd.Function):
    """Allocates what cuDNN's calls allocate, forward and backward, and computes nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        layers: int,
        width: int,
        first: bool,
        extra: bool,
        x: Tensor,
        flat: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        by_time = x.transpose(0, 1).contiguous() if first else x.contiguous()
        out = by_time.new_empty(*by_time.shape[:2], width)
        unit = out.numel() * out.element_size()
        reserve = by_time.new_empty(reserve_bytes(kind, unit, layers), dtype=torch.uint8)
        ctx.scratch = workspace_bytes(unit, sum(w.numel() for w in weights) * x.element_size(), extra=extra)
        by_time.new_empty(ctx.scratch, dtype=torch.uint8)
        ctx.save_for_backward(x, out, flat, reserve, *weights)
        return out.transpose(0, 1) if first else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, out, flat, _, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        scratch = x.new_empty(ctx.scratch, dtype=torch.uint8)
        pieces = out.new_empty(sum(w.numel() for w in weights)).split([w.numel() for w in weights])
        del scratch, grad, flat
        shaped = (piece.view(w.shape) for piece, w in zip(pieces, weights, strict=True))
        return None, None, None, None, None, torch.empty_like(x), None, *shaped


def run_recurrent(kind: str) -> Callable[..., Any]:
    """The replacement of one of aten's recurrent layers."""

    def run(
        x: Tensor,
        hx: Tensor | Sequence[Tensor],
        weights: Sequence[Tensor],
        has_biases: bool,  # noqa: ARG001 - the schema's order, here and below
        num_layers: int,
        dropout: float,
        train: bool,  # noqa: ARG001
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        copied = dtype is not weights[0].dtype or dtype is torch.bfloat16
        flat = x.new_empty(sum(w.numel() for w in weights) if copied else 0, dtype=dtype)
        pieces = list(weights)
        if copied:
            parts = flat.split([w.numel() for w in weights])  # type: ignore[no-untyped-call]
            pieces = [_Placed.apply(w, part) for w, part in zip(weights, parts, strict=True)]  # type: ignore[no-untyped-call]
        out: Tensor = _Recurrent.apply(  # type: ignore[no-untyped-call]
            kind, num_layers, states[0].shape[-1] * (1 + bidirectional), batch_first, bidirectional or dropout > 0,
            x.to(dtype), flat, *pieces,
        )  # fmt: skip
        return (out, *(torch.zeros_like(s, dtype=dtype) for s in states))

    return run


class _Placed(torch.autograd.Function):
    """A weight copied to its place in the flat buffer; its gradient has the weight's own dtype."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, place: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return place.view(weight.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].to(ctx.dtype), None
