"""Operators of torch's dispatcher: which ones are matrix products, and the format that a call computes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from halfstep.precision.formats import format_name

__all__ = ["CASTS", "is_product", "operand_format"]

CASTS = "casts"
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "convolution", "attention", "einsum", "mkldnn_rnn")


def is_product(op: str) -> bool:
    """Whether an operator is a matrix product or convolution, where most of the arithmetic is."""
    plain = op.removeprefix("aten::")
    return any(part in plain for part in _PRODUCTS) and not plain.startswith("_foreach")


def operand_format(name: str, inputs: Sequence[Tensor], result: Any) -> str:
    """The format of a call's floating-point inputs, "casts" for a conversion, "other" for integers."""
    floats = [x for x in inputs if x.is_floating_point()]
    if name in {"_to_copy", "copy_", "copy"}:
        target = result if isinstance(result, Tensor) else None
        source = inputs[-1].dtype if inputs else None
        if target is not None and source is not None and target.dtype != source and target.is_floating_point():
            return CASTS
    if not floats:
        return "other"
    if is_product(name):  # attention also has small fp32 inputs (statistics); the largest input decides
        return format_name(max(floats, key=lambda x: x.numel()).dtype)
    # The widest input decides: a sum of a 16-bit and a 32-bit tensor computes in 32 bits.
    return format_name(max((x.dtype for x in floats), key=lambda dtype: dtype.itemsize))
