"""Scratch memory that CUDA's libraries allocate while an operation runs, in addition to its inputs and outputs.

How it works. Fake tensors have the results of an operation, not the scratch memory of its kernel. The rules here come
from measurements of single operations on an H200 (torch 2.11, cuDNN 9.19; benchmarks/bench_plan_parts.py) and match them
to the byte or nearly so:

    attention, backward      an fp32 sum of the gradient of q, and an fp32 number per row
    convolution              see convolutions.py
    sum over leading dims    partial sums of every thread block, as in Reduce.cuh: 132 MiB for the bias of a wide
                             linear layer
    embedding, backward      the sorted indices
    softmax, backward        the product of the gradient and the result (SoftMax.cu)

cuDNN chooses its algorithms by unpublished rules, and other versions choose differently. That is why this memory is a
separate row in every table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halfstep.planning.convolutions import backward_bytes, forward_bytes, transform_bytes
from halfstep.planning.ledger import OPTIONAL

__all__ = ["CUBLAS_BYTES", "scratch_by_category", "scratch_bytes"]

# cuBLAS has a workspace of 32 MiB per handle on Hopper and later (about 8 MiB on older GPUs), and torch has a handle in the
# main thread and one in autograd's: 64 MiB were measured on an H200 after one product and its backward pass.
CUBLAS_BYTES = 64 << 20

_aten = torch.ops.aten
_REDUCE_THREADS, _THREADS_PER_MULTIPROCESSOR = 512, 2048
_MULTIPROCESSORS = 132  # of an H100 or H200; other GPUs have fewer and allocate less


def scratch_bytes(func: Any, args: Any, kwargs: Any, out: Any, *, tf32: bool = False) -> int | None:  # noqa: ARG001 - the signature of a dispatch mode
    """Bytes that the CUDA kernel of an operation allocates while it runs; None if no rule covers it.

    `tf32`: fp32 products may use TF32, for which cuDNN has other kernels.
    """
    if func in _CONVOLUTIONS:
        return int(_CONVOLUTIONS[func](args, out, tf32=tf32))
    rule = _RULES.get(func)
    return None if rule is None else int(rule(args, out))


def scratch_by_category(func: Any, args: Any, kwargs: Any, out: Any, *, tf32: bool = False) -> dict[str, int]:
    """The same by category: what the operation needs, and what it uses if it fits; empty if no rule covers it."""
    total = scratch_bytes(func, args, kwargs, out, tf32=tf32)
    if total is None:
        return {}
    optional = transform_bytes(args, out) if func is _aten.convolution.default and not tf32 else None
    return {"workspaces": total} if optional is None else {"workspaces": total - optional, OPTIONAL: optional}


def _attention_backward(args: Any, _out: Any) -> int:
    query = args[1]
    rows = query.numel() // query.shape[-1]
    return int(4 * (query.numel() + rows))


def _convolution_backward(args: Any, _out: Any, *, tf32: bool) -> int:
    grad, has_bias = args[0], args[10][2]
    dims = [0, *range(2, grad.dim())]
    return backward_bytes(args, _partial_sums(grad, dims, grad.shape[1]) if has_bias else 0, tf32=tf32)


def _embedding_backward(args: Any, _out: Any) -> int:
    return 4 * int(args[1].nbytes)  # the indices, sorted with their origins, and the copies that sorting makes


def _softmax_backward(args: Any, _out: Any) -> int:
    grad, result = args[0], args[1]
    return int(result.numel() * max(grad.element_size(), result.element_size()))


def _sum(args: Any, out: Any) -> int:
    x = args[0]
    return _partial_sums(x, args[1] if len(args) > 1 and args[1] else range(x.dim()), out.numel())


def _partial_sums(x: Tensor, dims: Iterable[int], num_outputs: int) -> int:
    """Partial sums of a reduction that keeps the innermost dimension: setReduceConfig of ATen/native/cuda/Reduce.cuh."""
    if not num_outputs or x.dim() == 0 or x.numel() == num_outputs:
        return 0
    reduced = {d % x.dim() for d in dims}
    if any(x.stride(d) == 1 and x.shape[d] > 1 for d in reduced):
        return 0  # whole warps share a row and leave one value per block
    rows = x.numel() // num_outputs
    vector = next(v for v in (4, 2, 1) if num_outputs % v == 0)
    columns = num_outputs // vector
    threads = _REDUCE_THREADS // vector
    wide, high = (min(threads, 1 << (n.bit_length() - 1)) for n in (columns, rows))
    width = min(wide, 32)
    height = min(high, threads // width)
    width = min(wide, threads // height)
    per_thread = -(-rows // height)
    if rows < height * 16 and rows < 256:
        return 0
    grid = -(-columns // width)
    target = _MULTIPROCESSORS * (_THREADS_PER_MULTIPROCESSOR // (width * height))
    if per_thread < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-per_thread // 16)), -(-per_thread // 256))
    return 4 * num_outputs * blocks * width * vector if blocks > 1 else 0


_RULES: dict[Any, Any] = {
    _aten.sum.dim_IntList: _sum,
    _aten._scaled_dot_product_flash_attention_backward.default: _attention_backward,  # noqa: SLF001
    _aten._scaled_dot_product_efficient_attention_backward.default: _attention_backward,  # noqa: SLF001
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten._softmax_backward_data.default: _softmax_backward,  # noqa: SLF001
}
_CONVOLUTIONS: dict[Any, Any] = {
    _aten.convolution.default: forward_bytes,
    _aten.convolution_backward.default: _convolution_backward,
}
