"""Regions: where the forward pass computes in 16 bits, and what stays in fp32 inside them.

`compute_region` is torch.autocast, a new one each time (an autocast object is not re-entrant, and its cache of cast
weights must not outlive an optimizer step), plus one rule: losses, softmax, log-softmax, large sums and norms compute in
fp32 on every device. torch's two lists of fp32 operations each lack a part of that:

    CPU     has the losses, but runs softmax, exp, sum and norm in 16 bits
    CUDA    has the others, but not cross_entropy (nor ctc_loss): its log-softmax requests the logits' own dtype, which
            autocast passes through, so a bf16 run of torch.amp rounds log-probabilities to 8 bits unless the logits are fp32

So each device gets what the other's list has, through torch's own dispatcher, and both get casts for operations that raise
when they meet a 16-bit weight; `precision/operations.py` has the names. The registrations act only inside a Halfstep region;
elsewhere they pass through, and a plain torch.autocast behaves as before.

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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.hardware.onednn import ignore_fallback_warnings
from halfstep.precision.formats import COMPUTE_DTYPES, DTYPES_16_BIT
from halfstep.precision.operations import KINDS, ON_EVERY_DEVICE, ON_THE_OTHER_LIST

__all__ = [
    "compute_region",
    "has_kernel",
    "install",
    "operations_of",
    "overloads",
    "recomputing",
    "reinstall",
    "upcast",
]


_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_DEVICE_TYPES = {key: device_type for device_type, key in _KEYS.items()}

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
    install(device_type)
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
def operations_of(device_type: str, kind: str) -> tuple[str, ...]:
    """The operations that a region treats in this way on a device type, as the dispatcher names them."""
    own = _KEYS.get(device_type, "")
    other = _KEYS["cuda" if device_type == "cpu" else "cpu"]
    listed = [
        name
        for base in ON_THE_OTHER_LIST.get(device_type, {}).get(kind, ())
        for name in overloads(base)
        if has_kernel(f"aten::{name}", other)
    ]
    needed = [name for base in ON_EVERY_DEVICE.get(device_type, {}).get(kind, ()) for name in overloads(base)]
    return tuple(name for name in listed + needed if not has_kernel(f"aten::{name}", own))


def overloads(base: str) -> list[str]:
    """The overloads of an operation that give a new result or work in place, as the dispatcher names them."""
    packet = getattr(torch.ops.aten, base, None)
    names = []
    for overload in packet.overloads() if packet is not None else ():
        name = base if overload == "default" else f"{base}.{overload}"
        if _known(name) and not any(a.is_out for a in getattr(packet, overload)._schema.arguments):  # noqa: SLF001
            names.append(name)
    return names


def _known(name: str) -> bool:
    try:
        torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU")  # noqa: SLF001 - the only way to query it
    except RuntimeError:  # an overload of TorchScript's, which the dispatcher does not know
        return False
    return True


def has_kernel(name: str, key: str) -> bool:
    """Whether the dispatcher has a kernel for an operation ("aten::sum.dim_IntList") under a dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)  # noqa: SLF001 - the only way to read the lists


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


def install(device_type: str) -> None:
    """Register the rule once per process, when a 16-bit region is first entered on such a device."""
    with _install:  # also where torch.compile stops tracing, so that the switch is set when the block is compiled
        if device_type in _libraries or device_type not in _KEYS:
            return
        if device_type == "cpu":
            ignore_fallback_warnings()
        # Both before any registration, which would change the answers.
        names = {(on, kind): operations_of(on, kind) for on in _KEYS for kind in KINDS}
        key = _KEYS[device_type]
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for kind in KINDS:
            for name in names[device_type, kind]:
                base, _, overload = name.partition(".")
                operation = getattr(getattr(torch.ops.aten, base), overload or "default")
                kernel = _kernel(operation, kind, key)
                library.impl(name, kernel, key, with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
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
        install(device_type)


def _kernel(operation: Any, kind: str, key: str) -> Callable[..., Any]:
    """A kernel for autocast's dispatch key `key` that casts inputs inside a region, and passes through elsewhere."""
    own = getattr(torch._C.DispatchKey, key)  # noqa: SLF001
    autocast = torch._C.DispatchKeySet(own)  # noqa: SLF001
    after = torch._C._dispatch_keyset_full_after(own)  # noqa: SLF001
    cast = _CASTS[kind]

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not (_backwards or getattr(_local, "active", False)):
            return operation.redispatch(keys & after, *args, **kwargs)  # as if nothing were registered
        with torch._C._ExcludeDispatchKeyGuard(autocast):  # noqa: SLF001 - how an autocast kernel redispatches
            args, kwargs = cast(args, kwargs, key)
            return operation(*args, **kwargs)

    return kernel


def _to_fp32(args: Any, kwargs: Any, key: str) -> Any:  # noqa: ARG001 - the signature of all casts
    if kwargs.get("dtype") in DTYPES_16_BIT:  # requested, as in sum(dtype=...), and a norm would reject a wider input
        return args, kwargs
    return upcast(args), upcast(kwargs)


def _to_16_bits(args: Any, kwargs: Any, key: str) -> Any:
    return _to((args, kwargs), torch.get_autocast_dtype(_DEVICE_TYPES[key]))


def _to_widest(args: Any, kwargs: Any, key: str) -> Any:
    return _to_fp32(args, kwargs, key) if len(_dtypes((*args, *kwargs.values()))) > 1 else (args, kwargs)


def _to_first(args: Any, kwargs: Any, key: str) -> Any:  # noqa: ARG001 - the signature of all casts
    first = args[0].dtype
    return (
        _to((args, kwargs), first)
        if first in _CASTABLE and len(_dtypes((*args, *kwargs.values()))) > 1
        else (args, kwargs)
    )


def _to_norm(args: Any, kwargs: Any, key: str) -> Any:  # noqa: ARG001 - the signature of all casts
    x, *weights = args
    return ((x, *upcast(weights)), upcast(kwargs)) if len(_dtypes((*args, *kwargs.values()))) > 1 else (args, kwargs)


def _dtypes(values: Iterable[Any]) -> set[torch.dtype]:
    """The dtypes that a cast may change; a loop, because pytree costs more than many of the operations."""
    dtypes: set[torch.dtype] = set()
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype in _CASTABLE:
                dtypes.add(value.dtype)
        elif isinstance(value, (list, tuple)):
            dtypes |= _dtypes(value)
    return dtypes


def _to(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype in _CASTABLE else t, tree)


_CASTABLE = (torch.float32, *DTYPES_16_BIT)  # autocast leaves fp64 alone
_CASTS = {"fp32": _to_fp32, "lower": _to_16_bits, "widest": _to_widest, "first": _to_first, "norm": _to_norm}
