"""Initial values of a sharded model: rank 0 builds it on the CPU, the others without memory, and each receives its shards.

How it works. A model that every rank builds on its GPU must fit there as a whole, though FSDP2 stores 1/N of it. So rank 0
builds it on the CPU, with the numbers of a run on one device, and every other rank on the meta device, where tensors have
shapes and no values. `fully_shard` moves one unit at a time to the GPU and keeps a shard (of meta tensors, a shard without
values). Then memory is allocated for shards, and each parameter is sent from rank 0, one at a time: a GPU never stores more
than its shards, one unit and one parameter. Buffers and parameters that are not sharded are broadcast.

Not every constructor works on the meta device: one may read a value (`.item()`), or store tensors in plain attributes, which
nobody would send. `meta_problem` detects the second; such models are built on the CPU of every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from halfstep.backends.consistency import broadcast_tensors
from halfstep.backends.fsdp.groups import is_sharded_model
from halfstep.optim.shards import is_sharded, local

__all__ = ["InitialValues", "allocate", "meta_problem"]


class InitialValues:
    """What the parameters of a model are before it is sharded: their values, and attributes that people set on them."""

    def __init__(self, model: nn.Module) -> None:
        self._values: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
        self._attributes = {name: dict(vars(p)) for name, p in model.named_parameters()}

    @torch.no_grad()
    def send(self, model: nn.Module, device: torch.device, *, rank: int, group: Any) -> None:
        """Give every rank its shards of rank 0's values; every rank calls it with its model after `fully_shard`."""
        from torch.distributed.tensor import distribute_tensor

        plain: list[Tensor] = []
        for name, param in model.named_parameters():
            if not is_sharded(param):
                plain.append(param)
                continue
            sharded: Any = param
            whole = (
                self._values.pop(name).to(device)
                if rank == 0
                else torch.empty(param.shape, dtype=param.dtype, device=device)
            )
            local(param).copy_(local(distribute_tensor(whole, sharded.device_mesh, sharded.placements)))
        broadcast_tensors([*plain, *model.buffers()], group)
        for name, param in model.named_parameters():  # such as a flag against weight decay, which an optimizer reads
            for key, value in self._attributes[name].items():
                if key not in vars(param):
                    setattr(param, key, value)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Put every tensor of a sharded model on `device`; those of the meta device get memory. Tied tensors stay tied."""
    memo: dict[int, Tensor] = {}
    for module in model.modules():
        for name, param in module._parameters.items():  # noqa: SLF001 - setattr would register it at the end
            if param is not None and param.is_meta and not is_sharded(param):
                if id(param) not in memo:
                    memo[id(param)] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                module._parameters[name] = memo[id(param)]  # type: ignore[assignment]  # noqa: SLF001

    def move(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        if is_sharded(tensor):  # replaced in place, so a tied one is met again with memory
            return torch.empty_like(tensor, device=device)
        return memo.setdefault(id(tensor), torch.empty_like(tensor, device=device))

    keep = list(model.buffers())  # so that no identity is reused
    apply: Any = model._apply  # noqa: SLF001 - as `to_empty` does; FSDP2 reads its shards again
    apply(move)
    del keep


def meta_problem(model: nn.Module) -> str:
    """Why a model that was built on the meta device cannot get its values from rank 0; "" if it can."""
    if is_sharded_model(model):
        return "the job has sharded it itself"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
        if is_wrapper or tensor.layout is not torch.strided or _is_expanded(tensor):
            return f"{name} is not a dense tensor"
    for path, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in {"_parameters", "_buffers", "_modules"}}
        for key, tensor in _tensors(own):
            if tensor.is_meta:
                return f"the attribute {f'{path}.{key}' if path else key} is a tensor, but not a buffer"
    return ""


def _is_expanded(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _tensors(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors in attributes of a module, in collections, and one level deep in other objects."""
    for key, value in attributes.items():
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, nn.Module | nn.Parameter):
                continue
            inner = [] if isinstance(leaf, Tensor) else pytree.tree_leaves(getattr(leaf, "__dict__", {}))
            for tensor in (leaf, *inner):
                if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):
                    yield key, tensor
