"""Sharded parameters: each rank steps the part that it stores.

FSDP2 (`fully_shard`) and tensor parallelism make a parameter a DTensor: a local tensor, a mesh of ranks, and how the whole
is placed on it. A rule that treats each element alone needs no other rank: weights, masters and moments are stepped as
plain local tensors, by the same kernels. Only the optimizer's `state_dict` has whole tensors: there the entries of a
sharded parameter are DTensors with its placements, so that torch's `get_optimizer_state_dict` and
`torch.distributed.checkpoint` save them, also for another number of ranks. 8-bit moments are fp32 there, as their blocks
belong to one way of sharding, and the int16 numbers of split masters are pairs of bytes, as gloo does not send int16.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from halfstep.kernels.layout import restore

__all__ = [
    "gradient_of",
    "in_files",
    "is_sharded",
    "local",
    "own_state",
    "placed",
    "placed_as",
    "set_data",
    "share_of",
    "whole_state",
]


def is_sharded(tensor: Any) -> TypeGuard[Any]:
    """Whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes long, and without it there are none
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """The part that this rank stores, which shares its memory; a plain tensor is its own."""
    part: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # noqa: SLF001 - to_local() records a graph
    return part


def gradient_of(param: Any) -> Tensor:
    """This rank's part of a parameter's gradient, which may have to be reduced over ranks first."""
    grad = param.grad
    if is_sharded(param) and is_sharded(grad) and tuple(grad.placements) != tuple(param.placements):
        grad = grad.redistribute(placements=param.placements)
    return local(grad)


def placed_as(param: Any, part: Tensor) -> Tensor:
    """The tensor of which every rank stores such a part, placed as `param` is; it may have further dimensions."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*param.shape, *part.shape[param.dim() :]))
    stride = param.stride() if len(shape) == param.dim() else torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride)


def set_data(param: Any, data: Tensor) -> None:
    """`param.data = data`, of any dtype, for a DTensor too: there the assignment would not reach the local tensor."""
    if not is_sharded(param):
        param.data = data
        return
    new = torch.nn.Parameter(placed_as(param, local(data)), requires_grad=param.requires_grad)
    vars(new).update(vars(param))  # swap_tensors exchanges attributes as well
    if getattr(param, "grad_dtype", param.dtype) is not param.dtype:
        new.grad_dtype = param.grad_dtype
    torch.utils.swap_tensors(param, new)  # type: ignore[no-untyped-call]


def share_of(param: Any, value: Any) -> Any:
    """This rank's part of a value of `param`: of a DTensor, however it is placed, or of the whole tensor."""
    if not isinstance(value, Tensor):
        return value
    if not is_sharded(param):
        return value.full_tensor() if is_sharded(value) else value
    mesh, placements = param.device_mesh, param.placements
    if is_sharded(value):
        if (value.device_mesh, tuple(value.placements)) != (mesh, tuple(placements)):
            value = value.redistribute(mesh, placements)
        return local(value)
    if value.dim() == 0 or value.shape[: param.dim()] != param.shape:  # a step count, or a scalar of the rule
        return value
    from torch.distributed.tensor import distribute_tensor

    return local(distribute_tensor(value.to(param.device), mesh, placements, src_data_rank=None))


def placed(value: Any, like: Any) -> Any:
    """A whole tensor with the placements of the DTensor `like`; anything else as it is."""
    fits = isinstance(value, Tensor) and is_sharded(like) and value.shape == like.shape and not is_sharded(value)
    return placed_as(like, share_of(like, value)) if fits else value


def whole_state(state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """The state of a sharded parameter as it is saved."""
    scaled = {name for name in state if f"{name}_scale" in state}
    shape = local(param).shape
    entries: dict[str, Any] = {}
    for name, value in state.items():
        if name in scaled or name == "low":
            part = _bytes(value) if name == "low" else restore(state, name).view(shape)
            entries[name] = placed_as(param, part)
        elif name.removesuffix("_scale") not in scaled:
            is_part = isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape
            entries[name] = placed_as(param, value) if is_part else value
    return entries


def own_state(saved: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """What this rank stores of a saved state of `param`."""
    entries = {name: share_of(param, value) for name, value in _unpacked(saved, param).items()}
    low = entries.get("low")
    if isinstance(low, Tensor) and low.dtype is torch.uint8:
        entries["low"] = low.contiguous().view(torch.int16).squeeze(-1)
    return entries


def in_files(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved optimizer state as a file stores it, where the low halves of split masters can be what they are, int16."""
    entries = {}
    for key, entry in saved["state"].items():
        low = entry.get("low") if isinstance(entry, Mapping) else None
        is_bytes = is_sharded(low) and low.dtype is torch.uint8
        entries[key] = {**entry, "low": _narrow(low)} if is_bytes else entry
    return {**saved, "state": entries}


def _narrow(low: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    part, shape = local(low).view(torch.int16).squeeze(-1), torch.Size(low.shape[:-1])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, low.device_mesh, low.placements, run_check=False, shape=shape, stride=stride)


def _unpacked(saved: Mapping[str, Any], param: Tensor) -> Mapping[str, Any]:
    """A state with the whole 8-bit moments of a sharded parameter in fp32: their blocks are not those of its parts."""
    scaled = [name for name in saved if f"{name}_scale" in saved]
    if not is_sharded(param) or not all(saved[name].numel() == param.numel() for name in scaled):
        return saved
    wide = {name: restore(saved, name).view(param.shape) for name in scaled}
    return {
        name: wide.get(name, value)
        for name, value in saved.items()
        if name.removesuffix("_scale") not in scaled or name in wide
    }


def _bytes(low: Tensor) -> Tensor:
    return low.unsqueeze(-1).view(torch.uint8)
