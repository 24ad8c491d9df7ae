"""Which kernel CUDA's attention uses, and what it saves: the choice, without a GPU.

    bf16, fp16, no mask          flash attention (on Hopper and Blackwell cuDNN's, which saves the same)
    a mask, or fp32              memory-efficient attention
    neither supports it          the plain formula, which saves the whole matrix of attention weights

Both kernels save q, k, v, the output and one fp32 value per row. They need a head size of at most 256 (flash) and the same
number of heads in q, k and v (memory-efficient), so grouped queries in fp32 fall back to the formula. Rows must be
contiguous: a bias that was permuted out of an embedding, as in T5, falls back too, and a contiguous one, as in Swin, does
not. Whether the bias is learnt does not matter.
Follows sdp_utils.cpp and attention.cpp of torch 2.11 to 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["attend", "kernel_for"]

# The kernels behind the public function, which chooses among them by device.
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001
_MATH = torch.ops.aten._scaled_dot_product_attention_math  # noqa: SLF001
_FLASH_MOST = 256  # head size
_PADDING = 8  # flash attention pads heads to a multiple of this
_MASK_ALIGNMENT = 16  # memory-efficient attention pads the rows of a mask to a multiple of this


def kernel_for(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    """The kernel that CUDA's scaled_dot_product_attention uses: "flash", "efficient" or "math"."""
    if q.dim() != 4 or k.dim() != 4 or not q.dtype is k.dtype is v.dtype or 0 in (*q.shape, *k.shape):
        return "math"
    if any(t.stride(-1) != 1 for t in (q, k, v, mask) if t is not None and t.shape[-1] > 1):
        return "math"
    if mask is None and q.dtype in DTYPES_16_BIT and q.shape[-1] == v.shape[-1] <= _FLASH_MOST:
        return "flash"
    same_heads = q.shape[1] == k.shape[1] == v.shape[1] and q.shape[0] == k.shape[0]
    if same_heads and q.dtype in (*DTYPES_16_BIT, torch.float32):
        # The kernel reads 16 bytes at a time, so the head size must be a multiple of that.
        alignment = 16 // q.element_size() if q.dtype is not torch.float32 else 4
        if q.shape[-1] % alignment == 0 and v.shape[-1] % alignment == 0:
            return "efficient"
    return "math"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention with the kernel that CUDA would choose."""
    kernel = kernel_for(query, key, value, attn_mask)
    if kernel == "flash":
        size = query.shape[-1]
        scale = size**-0.5 if scale is None else scale
        short = -size % _PADDING
        q, k, v = (F.pad(t, (0, short)) if short else t for t in (query, key, value))
        out: Tensor = _FLASH(q, k, v, dropout_p, is_causal, scale=scale)[0]
        return out[..., :size] if short else out
    if kernel == "efficient":
        keep_rows = any(t.requires_grad for t in (query, key, value))
        bias = _prepared(attn_mask, query, key)
        result: Tensor = _EFFICIENT(query, key, value, bias, keep_rows, dropout_p, is_causal, scale=scale)[0]
        return result
    plain: Tensor = _MATH(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    return plain


def _prepared(mask: Tensor | None, query: Tensor, key: Tensor) -> Any:
    """A mask in the kernel's layout: floating point, rows padded, expanded over heads."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    rows, columns = query.shape[-2], key.shape[-2]
    short = -columns % _MASK_ALIGNMENT
    if short:
        mask = F.pad(mask, (0, short))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], rows, columns)
