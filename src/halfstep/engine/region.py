"""Regions: where the forward pass computes in 16 bits, and what stays in fp32 inside them.

`compute_region` is torch.autocast, a new one each time (an autocast object is not re-entrant, and its cache of cast
weights must not outlive an optimizer step), plus one rule: losses, softmax, log-softmax, large sums and norms compute in
fp32 on every device. torch's two lists of fp32 operations each lack a part of that:

    CPU     has the losses, but runs softmax, exp, sum and norm in 16 bits
    CUDA    has the others, but not cross_entropy (nor ctc_loss): its log-softmax requests the logits' own dtype, which
            autocast passes through, so a bf16 run of torch.amp rounds log-probabilities to 8 bits unless the logits are fp32

So each device gets what the other's list has, through torch's own dispatcher. The registrations act only inside a Halfstep
region; elsewhere they pass through, and a plain torch.autocast behaves as before.

torch.compile caches compiled code on disk. The cache key of torch 2.11 records that autocast is on but not its dtype (2.13
does), so a model compiled in bf16 was silently reused for fp16; and no torch knows our rule. So a region adds a tag
to the key. (One limit: within one process torch.compile does not guard on the switch, so one compiled function must not be
called both inside a region and inside a plain torch.autocast.)

Normalisation layers are not in the list on purpose: they take and return 16 bits with fp32 inside.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.hardware.onednn import ignore_fallback_warnings
from halfstep.precision.formats import COMPUTE_DTYPES, DTYPES_16_BIT

__all__ = [
    "FP32_INPUTS",
    "FP32_OUTPUTS",
    "compute_region",
    "fp32_operations",
    "has_kernel",
    "recomputing",
    "reinstall",
    "upcast",
]


# Base names of operations that CUDA's autocast runs in fp32 and the CPU's does not; the planner uses them as well.
# CUDA casts the inputs of the first group, and has kernels for the second that read 16 bits and write fp32.
FP32_INPUTS = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "logsumexp", "dist", "renorm", "cosine_similarity", "pdist",
)  # fmt: skip
FP32_OUTPUTS = ("sum", "prod", "cumsum", "cumprod", "norm", "linalg_vector_norm", "linalg_matrix_norm")
# Base names of fp32 operations that one device's list lacks and the other's has; overloads are read from the installed torch.
_LACKING = {
    "cpu": (*FP32_INPUTS, "softmax", "log_softmax", *FP32_OUTPUTS),
    "cuda": ("cross_entropy_loss", "ctc_loss"),
}
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}

_local = threading.local()
_backwards: list[None] = []  # one entry for each backward pass in progress
_libraries: dict[str, torch.library.Library] = {}  # registrations live as long as these objects
_install = threading.Lock()


@contextlib.contextmanager
def compute_region(device_type: str, compute: str) -> Iterator[None]:
    """Compute in `compute` ("bf16", "fp16", or "fp32"/"tf32" for no casts) inside this block."""
    if compute not in COMPUTE_DTYPES:
        with torch.autocast(device_type, enabled=False):
            yield
        return
    _install_rule(device_type)
    before = getattr(_local, "active", False)
    _local.active = True
    try:
        dtype = COMPUTE_DTYPES[compute]
        # The cache of cast weights does not know the dtype: inside a region of the other one it would mix them up.
        other = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is not dtype
        with torch.autocast(device_type, dtype=dtype, cache_enabled=not other), _own_compilations(device_type, compute):
            yield
    finally:
        _local.active = before


@contextlib.contextmanager
def _own_compilations(device_type: str, compute: str) -> Iterator[None]:
    """Give torch.compile a separate cache for what it compiles inside this block."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled in this process yet
        yield
        return
    config = torch.compiler.config
    before = config.cache_key_tag
    config.cache_key_tag = f"{before} halfstep {device_type} {compute}"
    try:
        yield
    finally:
        config.cache_key_tag = before


@functools.cache
def fp32_operations(device_type: str) -> tuple[str, ...]:
    """The operations that the rule adds on a device type, as the dispatcher names them."""
    own = _KEYS.get(device_type, "")
    other = _KEYS["cuda" if device_type == "cpu" else "cpu"]
    names = []
    for base in _LACKING.get(device_type, ()):
        packet = getattr(torch.ops.aten, base, None)
        for overload in packet.overloads() if packet is not None else ():
            name = f"aten::{base}" if overload == "default" else f"aten::{base}.{overload}"
            if "out" not in overload and has_kernel(name, other) and not has_kernel(name, own):
                names.append(f"{base}.{overload}")
    return tuple(names)


def has_kernel(name: str, key: str) -> bool:
    """Whether the dispatcher has a kernel for an operation ("aten::sum.dim_IntList") under a dispatch key."""
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)  # noqa: SLF001 - the only way to read the lists
    except RuntimeError:  # a scalar overload of TorchScript's, which the dispatcher does not know
        return False


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """For a backward pass: activation checkpointing runs forwards in it, which must follow the rule they followed.

    On a GPU autograd runs them in its own thread, so the switch covers all threads during the pass.
    """
    _backwards.append(None)
    try:
        yield
    finally:
        _backwards.pop()


def upcast(tree: Any) -> Any:
    """The same tree with 16-bit floating tensors in fp32."""
    return pytree.tree_map(_upcast_one, tree)


def _upcast_one(value: Any) -> Any:
    is_16_bit = isinstance(value, Tensor) and value.dtype in DTYPES_16_BIT
    return value.float() if is_16_bit else value


def _install_rule(device_type: str) -> None:
    """Register the fp32 operations once per process, when a 16-bit region is first entered on such a device."""
    with _install:  # also where torch.compile stops tracing, so that the switch is set when the block is compiled
        if device_type in _libraries or device_type not in _LACKING:
            return
        if device_type == "cpu":
            ignore_fallback_warnings()
        # Before any registration, which would change the answers.
        names = {kind: fp32_operations(kind) for kind in _LACKING}[device_type]
        key = _KEYS[device_type]
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name in names:
            base, overload = name.split(".")
            operation = getattr(getattr(torch.ops.aten, base), overload)
            own = base if overload == "default" else name
            library.impl(own, _in_fp32(operation, key), key, allow_override=True)  # type: ignore[no-untyped-call]
        _libraries[device_type] = library


def reinstall() -> None:
    """Register the rule again where it is installed, after other kernels for the same operations were removed.

    torch keeps the last Python kernel of each operation in a table that it reads when it traces (fake tensors,
    torch.compile) and does not update when that kernel is removed: a compiled region would continue to run it.
    """
    with _install:
        installed = dict(_libraries)
        _libraries.clear()
    for device_type, library in installed.items():
        library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001 - the only way to remove registrations
        _install_rule(device_type)


def _in_fp32(operation: Any, key: str) -> Callable[..., Any]:
    below_autocast = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))  # noqa: SLF001
    composite = has_kernel(operation.name(), "CompositeImplicitAutograd")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        active = bool(_backwards) or getattr(_local, "active", False)
        if not active and composite:  # its parts have their own rules, which must still apply
            return operation.decompose(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(below_autocast):  # noqa: SLF001 - how an autocast kernel redispatches
            if active:
                args, kwargs = upcast(args), upcast(kwargs)
            return operation(*args, **kwargs)

    return kernel
