"""Registers the regions' rules with torch's dispatcher, under autocast's keys.

An autocast kernel runs before autograd: it casts the inputs and calls the operation again with the autocast key excluded,
so the cast is part of the graph. Operations that a device's own list lacks get a kernel of ours. Those of CUDA's list that a
lean region treats differently get one in front of torch's own, which is called everywhere else. That is Python in each layer
norm, so only a process that enters a lean region has them.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from halfstep.engine.region.casts import DIVISIONS, Make, Run, run_in_autocast, run_in_lean
from halfstep.engine.region.rule import STATE, Rule, current_rule
from halfstep.engine.region.tables import KEYS, exclude_key, is_excluded
from halfstep.hardware.onednn import ignore_fallback_warnings
from halfstep.precision.operations import (
    BROADCAST_BACK,
    KINDS,
    LEAN_16_BIT,
    LEAN_FP32,
    LEAN_QUOTIENTS,
    ON_EVERY_DEVICE,
    ON_THE_OTHER_LIST,
    SCALED_NORMS,
)

__all__ = ["has_kernel", "install", "operations_of", "overloads", "reinstall"]

# By device type, and whether they are those of lean regions only; registrations live as long as these objects.
_libraries: dict[tuple[str, bool], torch.library.Library] = {}
_install = threading.Lock()
_LEAN, _AUTOCAST = Rule.LEAN, Rule.AUTOCAST  # looking up a member of an enum costs as much as the comparison


@functools.cache
def operations_of(device_type: str, kind: str) -> tuple[str, ...]:
    """The operations that a region treats in this way on a device type, as the dispatcher names them."""
    own = KEYS.get(device_type, "")
    other = KEYS["cuda" if device_type == "cpu" else "cpu"]
    listed = [
        name
        for base in ON_THE_OTHER_LIST.get(device_type, {}).get(kind, ())
        for name in overloads(base)
        if has_kernel(f"aten::{name}", other)
    ]
    needed = [name for base in ON_EVERY_DEVICE.get(device_type, {}).get(kind, ()) for name in overloads(base)]
    return tuple(name for name in listed + needed if not has_kernel(f"aten::{name}", own))


@functools.cache
def _replaced(device_type: str) -> tuple[str, ...]:
    """The operations of a device's own fp32 list that a lean region treats differently."""
    key = KEYS[device_type]
    bases = (*SCALED_NORMS, *LEAN_16_BIT, *BROADCAST_BACK) if device_type == "cuda" else ()
    return tuple(name for base in bases for name in overloads(base) if has_kernel(f"aten::{name}", key))


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


def install(device_type: str, *, lean: bool = False) -> None:
    """Register the rules once per process, when a 16-bit region, or a lean one, is first entered on such a device."""
    with _install:  # also where torch.compile stops tracing, so that the switch is set when the block is compiled
        parts = (False, True) if lean else (False,)
        missing = [part for part in parts if (device_type, part) not in _libraries]
        if not missing or device_type not in KEYS:
            return
        if device_type == "cpu":
            ignore_fallback_warnings()
        for on in KEYS:  # all before any registration, which would change the answers
            _replaced(on)
            for kind in KINDS:
                operations_of(on, kind)
        for part in missing:
            _libraries[device_type, part] = _register(device_type, part)


def _register(device_type: str, lean: bool) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # torch warns that a kernel is replaced, which is the purpose
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in _kernels(device_type, lean=lean):
            library.impl(name, kernel, KEYS[device_type], with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
    return library


def reinstall() -> None:
    """Register the rules again where they are installed, after other kernels for the same operations were removed.

    torch keeps the last Python kernel of each operation in a table that it reads when it traces (fake tensors,
    torch.compile) and does not update when that kernel is removed: a compiled region would continue to run it.
    """
    with _install:
        installed = dict(_libraries)
        _libraries.clear()
    for library in installed.values():
        library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001 - the only way to remove registrations
    for device_type, lean in installed:
        install(device_type, lean=lean)


def _kernels(device_type: str, *, lean: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    if not lean:
        for kind in KINDS:
            for name in operations_of(device_type, kind):
                make = run_in_autocast(kind)
                yield name, _kernel(name, device_type, run_in_lean(name.partition(".")[0]) or make, make, None)
        return
    for name in (*_replaced(device_type), *LEAN_FP32):
        lean_only = run_in_lean(name.partition(".")[0])
        assert lean_only is not None
        own = _torchs_own(name, device_type) if name not in LEAN_FP32 else None
        yield name, _kernel(name, device_type, lean_only, None, own)
    for base in LEAN_QUOTIENTS:
        quotient = run_in_lean(base)
        assert quotient is not None
        yield f"{base}.Tensor", _kernel(f"{base}.Tensor", device_type, quotient, None, _unlisted(base, device_type))


def _torchs_own(name: str, device_type: str) -> Callable[..., Any]:
    """What torch's autocast does with an operation on its fp32 list: its own kernel, where torch can return it."""
    if hasattr(torch.library, "get_kernel"):
        own: Callable[..., Any] = torch.library.get_kernel(f"aten::{name}", KEYS[device_type]).call_boxed
        return own
    operation, own_key, _ = _handles(name, device_type)
    run = run_in_autocast("fp32")(operation, device_type)

    return _excluding(own_key, run)


def _unlisted(base: str, device_type: str) -> Callable[..., Any]:
    """What torch does with a division, which is on none of its lists: numbers among its arguments cannot be redispatched."""
    _, own_key, _ = _handles(f"{base}.Tensor", device_type)
    call = DIVISIONS[base]
    return _excluding(own_key, lambda args, _: call(*args))


def _excluding(own_key: Any, run: Run) -> Callable[..., Any]:
    """A kernel that runs an operation with autocast's key excluded."""

    def kernel(_: Any, *args: Any, **kwargs: Any) -> Any:
        before = is_excluded(own_key)
        exclude_key(own_key, True)
        try:
            return run(args, kwargs)
        finally:
            exclude_key(own_key, before)

    return kernel


def _kernel(
    name: str, device_type: str, lean: Make, autocast: Make | None, torchs_own: Callable[..., Any] | None
) -> Callable[..., Any]:
    """A kernel that follows the region's rule, and elsewhere does what torch does."""
    operation, own_key, after = _handles(name, device_type)
    run_lean = lean(operation, device_type)
    run_autocast = autocast(operation, device_type) if autocast is not None else None

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        rule = STATE.rule or current_rule()
        run = run_lean if rule is _LEAN else run_autocast if rule is _AUTOCAST else None
        if run is not None:
            before = is_excluded(own_key)
            exclude_key(own_key, True)
            try:
                return run(args, kwargs)
            finally:
                exclude_key(own_key, before)
        if torchs_own is not None:
            return torchs_own(keys, *args, **kwargs)
        return operation.redispatch(keys & after, *args, **kwargs)  # as if nothing were registered

    return kernel


def _handles(name: str, device_type: str) -> tuple[Any, Any, Any]:
    """The operation, the key to exclude below an autocast kernel, and those that come after it."""
    base, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, base), overload or "default")
    own = getattr(torch._C.DispatchKey, KEYS[device_type])  # noqa: SLF001
    return operation, own, torch._C._dispatch_keyset_full_after(own)  # noqa: SLF001
