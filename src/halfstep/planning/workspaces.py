"""Scratch memory that CUDA's libraries take while an operation runs, beyond its inputs and outputs.

How it works. Fake tensors know the results of an operation, not what its kernel allocates on the side. The rules here were
read off single operations on an H200 (torch 2.11, cuDNN 9.19; benchmarks/bench_plan_parts.py) and hold there to the byte
or nearly so:

    attention, backward      an fp32 sum of the gradient of q, and an fp32 number per row
    16-bit convolution       cuDNN works channels-last: copies of input and output in that layout, forwards and
                             backwards, unless the tensors are so already, the filter is one pixel or the groups are single
                             channels; less than 8 channels are filled up to 8
    fp32 3x3 convolution     backwards by Winograd's F(4x4, 3x3): 36 numbers for each 16 of input and output, and 4 times the
                             filter; forwards, for many positions and 256 channels or more, 81 times the filter
    sum over leading dims    partial sums of every block of threads, as Reduce.cuh lays them out: 132 MiB for the bias of a wide
                             linear layer
    embedding, backward      the sorted indices

cuDNN chooses its algorithms by rules of its own that it does not publish, and other versions choose otherwise. That is why
what is computed here is a line of its own in every table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["CUBLAS_BYTES", "scratch_bytes"]

# cuBLAS keeps 32 MiB per handle on Hopper and later and about 8 MiB before, and torch has a handle in the main thread and
# one in autograd's: measured 64 MiB on an H200 after one product and its backward pass.
CUBLAS_BYTES = {"new": 64 << 20, "old": 2 * 8519680}  # 8519680 = 4096 KiB * 2 + 16 KiB * 8, torch's default setting

_aten = torch.ops.aten
_16_BIT = (torch.float16, torch.bfloat16)
_REDUCE_THREADS, _THREADS_PER_MULTIPROCESSOR = 512, 2048
_MULTIPROCESSORS = 132  # of an H100 or H200; others have fewer, and take less
_SMALL_IMAGE = 1024  # positions; a filter of one pixel copies its input backwards at 14 x 14 and not at 256 x 256
_MANY_POSITIONS = 6000  # in batch and image together; between 3136, where it was not seen, and 6272, where it was


def scratch_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int | None:  # noqa: ARG001 - what a dispatch mode has
    """Bytes that the CUDA kernel of an operation takes while it runs; None where no rule is about it."""
    rule = _RULES.get(func)
    return None if rule is None else int(rule(args, out))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _attention_backward(args: Any, _out: Any) -> int:
    query = args[1]
    rows = query.numel() // query.shape[-1]
    return int(4 * (query.numel() + rows))


def _convolution(args: Any, out: Any) -> int:
    x, weight, groups = args[0], args[1], args[8]
    if not _is_dense(x, weight, groups):
        return 0
    if x.dtype in _16_BIT:
        return 0 if _one_pixel(weight) or _channels_last(x) else _filled(x) + _filled(out) + _bytes(weight)
    if _channels_last(x):
        return _bytes(x) + _bytes(out)
    positions = x.shape[0] * x.shape[2:].numel()
    wide = min(weight.shape[:2]) >= 256 and positions >= _MANY_POSITIONS
    return 81 * _bytes(weight) if wide and _winograd(args[3], weight, transposed=args[6]) else 0


def _convolution_backward(args: Any, _out: Any) -> int:
    grad, x, weight, groups = args[0], args[1], args[2], args[9]
    if not _is_dense(x, weight, groups):
        return 0
    if _one_pixel(weight):
        small = x.shape[2:].numel() <= _SMALL_IMAGE
        return 0 if weight.shape[1] < weight.shape[0] else _bytes(grad) + small * _bytes(x)
    if x.dtype in _16_BIT:
        return 0 if _channels_last(x) else _filled(x) + _filled(grad) + _bytes(weight)
    if _channels_last(x):
        return _bytes(x) + _bytes(grad)
    if _winograd(args[4], weight, transposed=args[7]) and min(weight.shape[:2]) >= 8:
        return _tiles(x) + _tiles(grad) + 4 * _bytes(weight)
    return 0


def _is_dense(x: Tensor, weight: Tensor, groups: int) -> bool:
    return x.dim() >= 3 and not (groups > 1 and weight.shape[1] == 1)


def _one_pixel(weight: Tensor) -> bool:
    return weight.shape[2:].numel() == 1


def _winograd(stride: Any, weight: Tensor, *, transposed: bool) -> bool:
    return not transposed and tuple(weight.shape[2:]) == (3, 3) and set(stride) == {1}


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.shape[1] > 1 and x.is_contiguous(memory_format=torch.channels_last)


def _filled(x: Tensor) -> int:
    """Bytes with the channels filled up to 8."""
    return _bytes(x) // x.shape[1] * max(8, x.shape[1])


def _tiles(x: Tensor) -> int:
    """Bytes of the transformed tiles of 6x6 for each 4x4."""
    rows, columns = (-(-size // 4) for size in x.shape[2:])
    return x.shape[0] * x.shape[1] * rows * columns * 36 * x.element_size()


def _embedding_backward(args: Any, _out: Any) -> int:
    return 4 * _bytes(args[1])  # the indices, sorted with their origins, and the sort's own copies


def _sum(args: Any, out: Any) -> int:
    """Partial sums of a reduction that leaves the fastest dimension: setReduceConfig of ATen/native/cuda/Reduce.cuh."""
    x = args[0]
    num_outputs = out.numel()
    if not num_outputs or x.dim() == 0 or x.numel() == num_outputs:
        return 0
    dims = args[1] if len(args) > 1 and args[1] else range(x.dim())
    reduced = {d % x.dim() for d in dims}
    if any(x.stride(d) == 1 and x.shape[d] > 1 for d in reduced):
        return 0  # whole warps share a row, and what they leave is a number per block
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
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
}
