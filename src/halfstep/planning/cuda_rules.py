"""Makes fake CPU tensors follow the code paths of CUDA: autocast, attention, dropout, softmax, recurrent layers.

How it works. A build of torch without CUDA cannot create CUDA tensors, not even fake ones, so the step is traced on fake
CPU tensors. Shapes and autograd are the same on both, but some operations depend on the device and then save different
tensors:

    autocast        CUDA computes layer norm, softmax, exp, sums and losses in fp32; the CPU in 16 bits. In the region of a
                    lean preset both follow the region's own rule, which is called here as it is on a GPU
    cross-entropy   CUDA has a fused kernel that saves the logits themselves; the CPU makes log-probabilities
    attention       CUDA's kernels save q, k, v, the output and one value per row; the CPU's math path saves the
                    whole matrix of attention weights
    dropout         CUDA saves a mask of one byte per element; the CPU a float per element
    softmax         CUDA's kernel reads fp16 and writes fp32 without an intermediate copy
    RMS norm        CUDA has one kernel; the CPU runs the formula and saves its steps
    group norm      CUDA copies a channels-last image to the default format; the CPU reads it as it is
    LSTM, GRU, RNN  cuDNN runs all time steps at once and saves a reserve; the CPU runs a loop

`as_on_cuda` registers CUDA's behaviour for these operations with torch's own dispatcher, in front of the CPU's, and
removes the registrations at the end. Below autograd nothing changes: the fake tensors run the operations that CUDA
tensors would run.
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

from halfstep.engine.region import has_kernel, install, overloads, reinstall, upcast
from halfstep.engine.region.aligned import on_every_device
from halfstep.engine.region.casts import run_in_lean
from halfstep.engine.region.rule import Rule, current_rule
from halfstep.kernels.cross_entropy import cross_entropy_as_on_cuda
from halfstep.planning.attention import attend
from halfstep.planning.norms import fused_rms_norm, group_norm, rms_norm
from halfstep.planning.recurrent import run_recurrent
from halfstep.precision.formats import DTYPES_16_BIT
from halfstep.precision.operations import FP32_INPUTS, FP32_OUTPUTS, LEAN_16_BIT, SCALED_NORMS

__all__ = ["as_on_cuda", "autocast_fp32"]

# CUDA's fp32 list (ATen/autocast_mode.h, torch 2.13), as base names; overloads are read from the installed torch. Those
# named here are in the CPU's list too. log_softmax and softmax have kernels of their own.
_FP32 = tuple(
    dict.fromkeys(
        (
            *FP32_INPUTS, *SCALED_NORMS, *(base for base in LEAN_16_BIT if base != "softmax"), "frobenius_norm",
            "nuclear_norm", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss",
            "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
            "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "cdist", "binary_cross_entropy_with_logits",
        )
    )
)  # fmt: skip
# In the CPU's lists and in none of CUDA's, nor in the Engine's rule: CUDA runs them in the dtype of their inputs.
_CPU_ONLY = (
    "avg_pool3d", "adaptive_avg_pool3d", "upsample_nearest1d", "reflection_pad1d", "reflection_pad2d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "grid_sampler",
)  # fmt: skip
_lock = threading.RLock()


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Inside this block, CPU tensors of this process follow CUDA's paths through the dispatcher."""
    with _lock, on_every_device():
        install(
            "cpu", lean=True
        )  # before the lists change, because the Engine's rule is derived from them, and below this one
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

        def register(name: str, function: Callable[..., Any], key: str) -> None:
            with warnings.catch_warnings():  # torch warns that a kernel is replaced, which is the purpose
                warnings.simplefilter("ignore", UserWarning)
                library.impl(name, function, key, allow_override=True)  # type: ignore[no-untyped-call]

        try:
            for name in autocast_fp32():
                register(name, _by_rule(name, _in_fp32(_operation(name))), "AutocastCPU")
            for base in FP32_OUTPUTS:
                for name in overloads(base):
                    register(name, _by_rule(name, _into_fp32(_operation(name))), "AutocastCPU")
            for name, inner in (("softmax.int", "_softmax"), ("log_softmax.int", "_log_softmax")):
                register(name, _softmax_in_fp32(_operation(name), getattr(torch.ops.aten, inner)), "AutocastCPU")
            register("cross_entropy_loss", _cross_entropy, "AutocastCPU")
            for base in _CPU_ONLY:
                for name in overloads(base):
                    if not has_kernel(f"aten::{name}", "AutocastCUDA"):
                        register(name, torch.library.fallthrough_kernel, "AutocastCPU")
            register("dropout", _dropout, "AutogradCPU")
            register("group_norm", group_norm, "AutogradCPU")
            register("scaled_dot_product_attention", attend, "AutogradCPU")
            if hasattr(torch.ops.aten, "_fused_rms_norm"):
                register("_fused_rms_norm", fused_rms_norm, "CPU")
                register("rms_norm", rms_norm, "AutogradCPU")
            if hasattr(torch.ops.aten, "_grouped_mm"):
                register("_grouped_mm", _multiply_groups, "Meta")
            for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
                register(f"{kind}.input", run_recurrent(kind), "AutogradCPU")
            yield
        finally:
            library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001 - the only way to remove registrations
            reinstall()


def autocast_fp32() -> list[str]:
    """The operations that CUDA's autocast computes in fp32 in this torch, as the dispatcher names them."""
    return [
        name
        for base in _FP32
        for name in overloads(base)
        if base == "rms_norm" or has_kernel(f"aten::{name}", "AutocastCUDA")  # the region adds it where torch lacks it
    ]


def _operation(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _below_autocast() -> Any:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # noqa: SLF001
    return torch._C._ExcludeDispatchKeyGuard(key)  # noqa: SLF001 - how an autocast kernel redispatches


def _by_rule(name: str, on_cuda: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that runs what a lean region does with an operation, and `on_cuda` in any other."""
    make = run_in_lean(name.partition(".")[0])
    if make is None:
        return on_cuda
    run = make(_operation(name), "cpu")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if current_rule() is not Rule.LEAN:
            return on_cuda(*args, **kwargs)
        with _below_autocast():
            return run(args, kwargs)

    return kernel


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
    """CUDA's kernels read fp16 and write fp32 (`half_to_float`); bf16 is copied to fp32 first.

    A dtype that the caller requests is respected. Without one, a lean region leaves softmax in 16 bits.
    """
    in_16_bits = operation.overloadpacket.__name__ in LEAN_16_BIT

    def kernel(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        with _below_autocast():
            lean = in_16_bits and current_rule() is Rule.LEAN
            if dtype is None and x.dtype in DTYPES_16_BIT and not lean:
                dtype = torch.float32
            if x.dtype is torch.float16 and dtype is torch.float32:
                return inner(x, dim, True)
            return operation(x, dim, dtype)

    return kernel


def _cross_entropy(*args: Any, **kwargs: Any) -> Any:
    with _below_autocast():
        if current_rule() is None:  # a plain torch.autocast of the model's own
            return torch.ops.aten.cross_entropy_loss.default(*upcast(args), **upcast(kwargs))
        return cross_entropy_as_on_cuda(*args, **kwargs)


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
    """The result of a grouped product: torch's own shape function supports bf16 only, the CUDA kernel fp32 and fp16 too."""
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        shape.insert(0, len(a) if ends is None or a.dim() == 3 else len(ends))
    row = -(-shape[-1] * a.element_size() // 16) * 16 // a.element_size()  # rows start at multiples of 16 bytes
    strides = [shape[-2] * row, row, 1][-len(shape) :]
    return a.new_empty_strided(shape, strides, dtype=dtype or a.dtype)
