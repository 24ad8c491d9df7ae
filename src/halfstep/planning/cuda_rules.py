"""Makes fake CPU tensors take the ways that CUDA tensors take: autocast, attention, dropout, softmax, recurrent layers.

How it works. A build of torch without CUDA cannot make CUDA tensors, fake ones neither, so the step is traced on fake
CPU tensors. Shapes and autograd are the same on both, but some operations choose another way by device, and then keep
other tensors:

    autocast        CUDA computes layer norm, softmax, exp, sums and losses in fp32; the CPU in 16 bits
    attention       CUDA's kernels keep q, k, v, the output and one number per row; the CPU's math path keeps the
                    whole matrix of weights
    dropout         CUDA keeps a mask of one byte per element; the CPU a float per element
    softmax         CUDA's kernel reads fp16 and writes fp32 without a copy between
    LSTM, GRU, RNN  cuDNN runs all steps at once and keeps a reserve; the CPU runs a loop

`as_on_cuda` registers the CUDA way for these operations with torch's own dispatcher, in front of the CPU's, and takes
the registrations away at the end. Below autograd nothing changes: the fake tensors see the operations that CUDA tensors
would have seen.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.engine.region import fp32_operations, reinstall, upcast
from halfstep.planning.attention import attend
from halfstep.planning.recurrent import run_recurrent
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["as_on_cuda", "autocast_fp32"]

# CUDA's fp32 list (ATen/autocast_mode.h, torch 2.13), as base names; overloads are read from the installed torch.
_FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "group_norm", "rms_norm", "frobenius_norm",
    "nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "dist", "pdist", "cdist",
    "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bicubic2d_aa", "binary_cross_entropy_with_logits",
)  # fmt: skip
# The same by way of the output's dtype: the kernel reads 16 bits and writes fp32.
_FP32_OUT = ("sum", "prod", "cumsum", "cumprod", "norm", "linalg_vector_norm", "linalg_matrix_norm")
# On the CPU's lists and on none of CUDA's: they run in the dtype they are given.
_CPU_ONLY = (
    "avg_pool3d", "adaptive_avg_pool3d", "upsample_nearest1d", "reflection_pad1d", "reflection_pad2d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "grid_sampler", "fft_fft", "fft_ifft", "fft_rfft",
    "fft_irfft", "quantile", "nanquantile", "stft",
)  # fmt: skip
_lock = threading.RLock()


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Inside this block, CPU tensors of this process take CUDA's ways through the dispatcher."""
    with _lock:
        for kind in ("cpu", "cuda"):
            fp32_operations(kind)  # read and remembered before the lists change: the Engine's rule is made from them
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

        def put(name: str, function: Callable[..., Any], key: str) -> None:
            with warnings.catch_warnings():  # torch warns that a kernel was there before; that is the point
                warnings.simplefilter("ignore", UserWarning)
                library.impl(name, function, key, allow_override=True)  # type: ignore[no-untyped-call]

        try:
            for name in autocast_fp32():
                put(name, _in_fp32(_operation(name)), "AutocastCPU")
            for base in _FP32_OUT:
                for name in _overloads(base):
                    put(name, _into_fp32(_operation(name)), "AutocastCPU")
            for name, inner in (("softmax.int", "_softmax"), ("log_softmax.int", "_log_softmax")):
                put(name, _softmax_in_fp32(_operation(name), getattr(torch.ops.aten, inner)), "AutocastCPU")
            for base in _CPU_ONLY:
                for name in _overloads(base):
                    if not _has(name, "AutocastCUDA"):
                        put(name, torch.library.fallthrough_kernel, "AutocastCPU")
            put("dropout", _dropout, "AutogradCPU")
            put("scaled_dot_product_attention", attend, "AutogradCPU")
            if hasattr(torch.ops.aten, "_grouped_mm"):
                put("_grouped_mm", _multiply_groups, "Meta")
            for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
                put(f"{kind}.input", run_recurrent(kind), "AutogradCPU")
            yield
        finally:
            library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001 - the only way to take registrations back
            reinstall()


def autocast_fp32() -> list[str]:
    """The operations that CUDA's autocast computes in fp32 in this torch, as the dispatcher names them."""
    return [name for base in _FP32 for name in _overloads(base) if _has(name, "AutocastCUDA")]


def _overloads(base: str) -> list[str]:
    packet = getattr(torch.ops.aten, base, None)
    names = [] if packet is None else [o for o in packet.overloads() if "out" not in o]
    return [n for n in (base if o == "default" else f"{base}.{o}" for o in names) if _known(n)]


def _known(name: str) -> bool:
    try:
        torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU")  # noqa: SLF001 - no other way to ask
    except RuntimeError:  # an overload of TorchScript's, which the dispatcher does not know
        return False
    return True


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)  # noqa: SLF001 - how the lists are read


def _operation(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _below_autocast() -> Any:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # noqa: SLF001
    return torch._C._ExcludeDispatchKeyGuard(key)  # noqa: SLF001 - how an autocast kernel goes on


def _in_fp32(operation: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            return operation(*upcast(args), **upcast(kwargs))

    return kernel


def _into_fp32(operation: Any) -> Callable[..., Any]:
    takes_dtype = any(a.name == "dtype" for a in operation._schema.arguments)  # noqa: SLF001 - the public name is newer

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            sixteen = any(isinstance(a, Tensor) and a.dtype in DTYPES_16_BIT for a in pytree.tree_leaves(args))
            if sixteen and takes_dtype and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
            elif sixteen and not takes_dtype:
                args, kwargs = upcast(args), upcast(kwargs)
            return operation(*args, **kwargs)

    return kernel


def _softmax_in_fp32(operation: Any, inner: Any) -> Callable[..., Any]:
    """CUDA's kernels take fp16 in and give fp32 out (`half_to_float`); bf16 is copied to fp32 before.

    A dtype that the caller names stays.
    """

    def kernel(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        with _below_autocast():
            if dtype is None and x.dtype in DTYPES_16_BIT:
                dtype = torch.float32
            if x.dtype is torch.float16 and dtype is torch.float32:
                return inner(x, dim, True)
            return operation(x, dim, dtype)

    return kernel


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or not x.numel():
        return x
    return torch.native_dropout(x, p, train)[0]


def _multiply_groups(
    a: Tensor,
    b: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,  # noqa: ARG001 - the schema's order
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The result of a product by groups: torch's own shape function knows bf16 alone, the CUDA kernel fp32 and fp16 too."""
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        shape.insert(0, len(a) if ends is None or a.dim() == 3 else len(ends))
    row = -(-shape[-1] * a.element_size() // 16) * 16 // a.element_size()  # rows begin at multiples of 16 bytes
    strides = [shape[-2] * row, row, 1][-len(shape) :]
    return a.new_empty_strided(shape, strides, dtype=dtype or a.dtype)
