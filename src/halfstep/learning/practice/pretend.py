"""A GPU for the reader's script on a machine without one: requests for `cuda` are served by the CPU.

A script for a GPU asks `torch.cuda.is_available()`, moves tensors to "cuda", enters `autocast("cuda")` and creates `GradScaler("cuda")`.
Without a GPU torch would disable the last two, and the run would be in fp32. So, in the process of a practice, the script
sees one GPU; its tensors are the CPU's, autocast is the CPU's with the dtype that CUDA's has, and the scaler is active. Only
the script and modules next to it see that GPU: libraries get the true answer.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["MemoryReads", "pretend_gpu"]

_CUDA = re.compile(r"cuda(:\d+)?")
_TOTAL_BYTES = 16 * 2**30
_NO_EFFECT = ("synchronize", "empty_cache", "ipc_collect", "set_device", "manual_seed", "manual_seed_all", "init",
              "set_per_process_memory_fraction")  # fmt: skip
_PEAKS = ("max_memory_allocated", "max_memory_reserved")
_CURRENT = ("memory_allocated", "memory_reserved")
_RESETS = ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")


class MemoryReads(SimpleNamespace):
    """Functions behind torch.cuda's memory statistics: `current()` and `peak()` in bytes, `reset()`, `note(name, value)`."""

    current: Callable[[], int]
    peak: Callable[[], int]
    reset: Callable[[], None]
    note: Callable[[str, float], None]


class _OnCpu(TorchFunctionMode):
    """Runs on the CPU what is requested on `cuda`."""

    def __init__(self) -> None:
        super().__init__()
        self.requested = False  # whether the script has put anything on `cuda`

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            self.requested = True
            return args[0]
        if kwargs and kwargs.get("pin_memory") is True:  # torch.randn(..., pin_memory=True) raises without a GPU
            kwargs = {**kwargs, "pin_memory": False}
        on_cpu = {key: _cpu(value) for key, value in (kwargs or {}).items()}
        positional = tuple(map(_cpu, args))
        changed = any(a is not b for a, b in zip(positional, args, strict=True))
        self.requested |= changed or any(on_cpu[key] is not kwargs[key] for key in on_cpu)
        return func(*positional, **on_cpu)


def _cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and _CUDA.fullmatch(value):
        return "cpu"
    return value


class _Event:
    """torch.cuda.Event with the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0

    def record(self, *_: Any) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, other: _Event) -> float:
        return (other._time - self._time) * 1000

    def synchronize(self) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True


def pretend_gpu(
    folders: tuple[str, ...], memory: MemoryReads, *, bf16: bool, max_init_scale: float | None = None
) -> TorchFunctionMode:
    """Patch torch for this process; files in `folders` see a GPU. Returns the mode that the script has to run under."""
    cuda = torch.cuda
    truly_available = cuda.is_available
    capability = (8, 0) if bf16 else (7, 5)

    def is_available() -> bool:
        caller = sys._getframe(1).f_code.co_filename  # noqa: SLF001 - the public ways are slow
        return str(Path(caller).parent) in folders or truly_available()

    cuda.is_available = is_available
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.is_bf16_supported = lambda *_, **__: bf16
    cuda.get_device_name = lambda *_: "CPU in place of a GPU"
    cuda.get_device_capability = lambda *_: capability
    cuda.get_device_properties = lambda *_: SimpleNamespace(  # type: ignore[assignment]
        name="CPU in place of a GPU", total_memory=_TOTAL_BYTES, major=capability[0], minor=capability[1],
        multi_processor_count=1,
    )  # fmt: skip
    cuda.Event = _Event  # type: ignore[assignment, misc]
    for name in _NO_EFFECT:
        setattr(cuda, name, lambda *_, **__: None)
    _patch_memory(memory)
    mode = _OnCpu()
    _patch_amp(mode, max_init_scale)
    torch.compile = _uncompiled
    set_default = torch.set_default_device
    torch.set_default_device = lambda device: set_default(_cpu(device))
    return mode


def _uncompiled(model: Any = None, **_: Any) -> Any:
    """torch.compile without compilation: what is measured here does not depend on it."""
    return (lambda function: function) if model is None else model


def _patch_memory(memory: MemoryReads) -> None:
    def reader(name: str, value: Callable[[], int]) -> Callable[..., int]:
        def read(*_: Any, **__: Any) -> int:
            memory.note(name, value())
            return value()

        return read

    def stats(*_: Any, **__: Any) -> dict[str, int]:
        memory.note("memory_stats", memory.peak())
        return {f"{kind}_bytes.all.{key}": value
                for kind in ("allocated", "reserved", "active")
                for key, value in (("current", memory.current()), ("peak", memory.peak()))}  # fmt: skip

    functions: dict[str, Callable[..., Any]] = {name: reader(name, memory.peak) for name in _PEAKS}
    functions |= {name: reader(name, memory.current) for name in _CURRENT}
    functions |= dict.fromkeys(_RESETS, lambda *_, **__: memory.reset())
    functions |= {"memory_stats": stats, "memory_summary": lambda *_, **__: str(stats())}
    functions["mem_get_info"] = lambda *_: (_TOTAL_BYTES - reader("mem_get_info", memory.current)(), _TOTAL_BYTES)
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
        setattr(torch.cuda.memory, name, function)


def _patch_amp(mode: _OnCpu, max_init_scale: float | None) -> None:
    """autocast and GradScaler for `cuda` are those of the CPU, enabled, with CUDA's default dtype.

    A script that has put its tensors on `cuda` and passes their `device.type` to autocast passes "cpu" here, and means `cuda`.
    """
    from torch.amp import autocast_mode, grad_scaler

    enter, create = autocast_mode.autocast.__init__, grad_scaler.GradScaler.__init__

    def autocast_init(
        self: Any, device_type: Any, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        if device_type == "cuda" or (device_type == "cpu" and mode.requested):
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        enter(self, device_type, dtype, enabled, cache_enabled)

    def scaler_init(self: Any, device: str = "cuda", init_scale: float = 2.0**16, *args: Any, **options: Any) -> None:
        limit = init_scale if max_init_scale is None else min(init_scale, max_init_scale)
        create(self, _cpu(device), limit, *args, **options)

    autocast_mode.autocast.__init__ = autocast_init  # type: ignore[method-assign]
    grad_scaler.GradScaler.__init__ = scaler_init  # type: ignore[method-assign]
