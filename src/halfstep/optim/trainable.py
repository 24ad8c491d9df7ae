"""Which tensors can be trained: plain, dense ones in a float dtype.

A tensor subclass that wraps others (quantised weights) has no memory of its own at the address that a kernel would step,
and arithmetic on its bits means something else or nothing. Such parameters are rejected by name while they require
gradients. Frozen ones are only read by the model and pass untouched. A DTensor is rejected too, except by an optimizer that
steps the part of each rank (`optim.shards`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from halfstep.errors import SettingError
from halfstep.optim.shards import is_sharded, local

__all__ = ["check_model", "check_trainable", "unsupported_kind"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
_SHARDED = "a parameter sharded by FSDP2 or tensor parallelism"
_WAY_OUT = {
    "lazy": "Run one batch through the model first, then build the optimizer and the Engine.",
    "sharded": (
        'Use Engine(backend="fsdp") with a model that fully_shard has sharded or that is not sharded yet, or halfstep.optim in a loop of '
        "your own."
    ),
    "whole": "Its rule needs whole tensors; use AdamW, SGD or Lion, or leave this parameter out of fully_shard.",
    "other": (
        "Freeze it (requires_grad_(False)) and train adapters in a plain dtype next to it, or train without Halfstep's "
        "Engine, with torch.optim or the optimizer of the library that made it."
    ),
}


def unsupported_kind(tensor: Tensor) -> tuple[str, str] | None:
    """What a tensor is, in words, and the way out, where it is not a plain dense float tensor; else None."""
    own = type(tensor)
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if is_lazy(tensor):
        return "uninitialized (a lazy module has not run yet)", _WAY_OUT["lazy"]
    if is_sharded(tensor):
        return f"a DTensor, {_SHARDED}", _WAY_OUT["sharded"]
    if getattr(tensor, "_is_flat_param", False):
        return "a flat parameter of FullyShardedDataParallel", _WAY_OUT["sharded"]
    if is_fake(tensor):  # of a plan: it stands for a plain tensor
        return None
    if is_wrapper or own.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a tensor subclass, {own.__name__}", _WAY_OUT["other"]
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return f"not dense (its layout is {layout})", _WAY_OUT["other"]
    if tensor.is_quantized or tensor.dtype not in _DTYPES:
        return f"quantised or not a float ({str(tensor.dtype).removeprefix('torch.')})", _WAY_OUT["other"]
    return None


def check_trainable(named: Iterable[tuple[str, Tensor]], trainer: str, *, shards: bool | None = None) -> None:
    """Raise for the first of these parameters that requires gradients and cannot be trained.

    `shards`: whether the trainer's arithmetic works on the part of a rank; None for one that knows no sharded parameters.
    """
    for name, param in named:
        kind = unsupported_kind(local(param) if shards else param) if param.requires_grad else None
        if kind is not None and shards is False and is_sharded(param):
            kind = kind[0], _WAY_OUT["whole"]
        if kind is not None:
            description, way_out = kind
            raise SettingError(f"{trainer} cannot train parameter {name}: it is {description}. {way_out}")


def check_model(model: nn.Module, *, shards: bool = False) -> None:
    """Raise for a model that the Engine cannot train; `shards`: its backend knows sharded parameters."""
    for name, module in model.named_modules():
        # Its parameters may be views of the shards, which look like plain tensors.
        if any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__):
            raise SettingError(
                f"The Engine cannot train {name or 'the model'}: it is FullyShardedDataParallel. {_WAY_OUT['sharded']}"
            )
    check_trainable(model.named_parameters(), "The Engine", shards=shards or None)
