"""Regions: where the forward pass computes in 16 bits, and what stays in fp32 inside them.

`compute_region` is torch.autocast, entered anew each time (an autocast object is not re-entrant, and its cache of
cast weights must not outlive an optimizer step), plus one rule: losses, softmax, log-softmax, large sums and norms
compute in fp32 on every device. CUDA's autocast does that by itself, with one gap that is not closed yet: cross_entropy
asks for its log-softmax in the logits' own dtype, which autocast lets pass, so on CUDA it is rounded to 16 bits unless the
logits are fp32; the truth table says so. The CPU's autocast has the losses on its list of fp32 operations, but softmax,
exp, sum and norm run in 16 bits there. So the operations that CUDA keeps in fp32 are
registered for the CPU too, by torch's own dispatcher, and they act only inside a Halfstep region; elsewhere they
pass through and a plain torch.autocast("cpu") behaves as it always did. (One limit: torch.compile does not look at this
switch, so one compiled function must not be called both inside a region and inside a plain torch.autocast("cpu").)

Normalisation layers are left out on purpose: they take and give 16 bits with fp32 inside.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["COMPUTE_DTYPES", "compute_region", "fp32_operations", "recomputing", "upcast"]

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Base names of CUDA's fp32 list that the CPU's lacks; overloads are read from the installed torch.
_FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod", "norm", "linalg_vector_norm",
    "linalg_matrix_norm", "logsumexp", "dist", "renorm", "cosine_similarity", "pdist",
)  # fmt: skip

_local = threading.local()
_library: torch.library.Library | None = None
_install = threading.Lock()


@contextlib.contextmanager
def compute_region(device_type: str, compute: str) -> Iterator[None]:
    """Compute in `compute` ("bf16", "fp16", or "fp32"/"tf32" for no casts) inside this block."""
    if compute not in COMPUTE_DTYPES:
        with torch.autocast(device_type, enabled=False):
            yield
        return
    if device_type == "cpu":
        _install_cpu_rule()
    before = getattr(_local, "active", False)
    _local.active = True
    try:
        dtype = COMPUTE_DTYPES[compute]
        # The cache of cast weights does not know the dtype: inside a region of the other one it would mix them up.
        other = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is not dtype
        with torch.autocast(device_type, dtype=dtype, cache_enabled=not other):
            yield
    finally:
        _local.active = before


@functools.cache
def fp32_operations() -> tuple[str, ...]:
    """The operations that the CPU rule adds, as the dispatcher names them."""
    names = []
    for base in _FP32:
        packet = getattr(torch.ops.aten, base, None)
        for overload in packet.overloads() if packet is not None else ():
            name = f"aten::{base}" if overload == "default" else f"aten::{base}.{overload}"
            if "out" not in overload and _has(name, "AutocastCUDA") and not _has(name, "AutocastCPU"):
                names.append(f"{base}.{overload}")
    return tuple(names)


def _has(name: str, key: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)  # noqa: SLF001 - the only way to read the lists
    except RuntimeError:  # a scalar overload of TorchScript's, which the dispatcher does not know
        return False


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """For a backward pass: activation checkpointing runs forwards in it, which must follow the rule they followed."""
    before = getattr(_local, "active", False)
    _local.active = True
    try:
        yield
    finally:
        _local.active = before


def upcast(tree: Any) -> Any:
    """The same tree with 16-bit floating tensors in fp32."""
    return pytree.tree_map(_upcast_one, tree)


def _upcast_one(value: Any) -> Any:
    is_16_bit = isinstance(value, Tensor) and value.dtype in {torch.float16, torch.bfloat16}
    return value.float() if is_16_bit else value


def _install_cpu_rule() -> None:
    """Register the fp32 operations once per process, when a 16-bit region is first entered on a CPU."""
    global _library  # noqa: PLW0603 - registrations live as long as this object
    with _install:
        if _library is not None:
            return
        names = fp32_operations()  # before the first registration, which would change the answer
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name in names:
            base, overload = name.split(".")
            operation = getattr(getattr(torch.ops.aten, base), overload)
            own = base if overload == "default" else name
            library.impl(own, _in_fp32(operation), "AutocastCPU")  # type: ignore[no-untyped-call]
        _library = library


def _in_fp32(operation: Callable[..., Any]) -> Callable[..., Any]:
    below_autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # noqa: SLF001

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below_autocast):  # noqa: SLF001 - how an autocast kernel redispatches
            if getattr(_local, "active", False):
                args, kwargs = upcast(args), upcast(kwargs)
            return operation(*args, **kwargs)

    return kernel
