"""Which operations' results `recompute="cheap"` saves: those that cost more than reading their result again."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["draws_random_numbers", "is_saved"]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "mkldnn_linear", "_int_mm")
_SCALED_PRODUCTS = ("_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
_CONVOLUTIONS = (
    "convolution",
    "_convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "mkldnn_convolution",
    "miopen_convolution",
    "_slow_conv2d_forward",
    "slow_conv_transpose2d",
)
_ATTENTIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
_OTHERS = (
    "embedding",
    "_embedding_bag",
    "_cudnn_rnn",
    "mkldnn_rnn_layer",
    "_fft_r2c",
    "_fft_c2r",
    "_fft_c2c",
    "sort",
    "topk",
)
_SAVED = frozenset((*_PRODUCTS, *_SCALED_PRODUCTS, *_CONVOLUTIONS, *_ATTENTIONS, *_OTHERS))
_OF_TORCH = {"aten", "prim", "prims", "c10d", "_c10d_functional"}


@functools.cache
def is_saved(operation: Any) -> bool:
    """Whether "cheap" saves the results of an operation."""
    if not isinstance(operation, torch._ops.OpOverload):  # noqa: SLF001 - the class of what modes receive
        return True  # an operation that takes functions, such as flex_attention
    if operation.namespace in _OF_TORCH:
        return operation._schema.name.partition("::")[2] in _SAVED  # noqa: SLF001
    return not operation._schema.is_mutable  # noqa: SLF001 - one that writes into its inputs must run again


@functools.cache
def _dropout_position(operation: Any) -> int | None:
    """Where a random operation has its `dropout_p`; -1 for one without, None for an operation that is not random."""
    if not isinstance(operation, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:  # noqa: SLF001
        return None
    names = [argument.name for argument in operation._schema.arguments]  # noqa: SLF001
    return names.index("dropout_p") if "dropout_p" in names else -1


def draws_random_numbers(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call advances a random generator."""
    position = _dropout_position(operation)
    if position is None:
        return False
    if position < 0:
        return True
    return bool(args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))
