"""What sharding divides of a model: its weights and gradients, and the units in which FSDP2 gathers them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from halfstep.planning.ranks.shards import Part
from halfstep.precision.formats import FORMATS
from halfstep.precision.policy import Policy

__all__ = ["Units", "find_units", "model_parts"]


@dataclass(frozen=True)
class Units:
    """Elements that FSDP2 gathers at once."""

    largest: int  # of the largest module that `Job.shard` names; 0 if it names none
    root: int  # of everything outside of them


def find_units(model: nn.Module, shard: Iterable[type | str]) -> Units:
    """The units of a model whose modules `shard` names are sharded, and then the root."""
    modules = _modules(model, shard)
    inside = {p for module in modules for p in module.parameters()}
    root = sum(p.numel() for p in model.parameters() if p not in inside)
    return Units(max((sum(p.numel() for p in module.parameters()) for module in modules), default=0), root)


def model_parts(model: nn.Module, shard: Iterable[type | str], policy: Policy, accumulate: int) -> list[Part]:
    """Weights and gradients of a model that the policy was applied to."""
    inside = {p for module in _modules(model, shard) for p in module.parameters()}
    widened = int(FORMATS[policy.grads_format(accumulate)].bytes)
    parts = []
    for param in model.parameters():
        shape, at_root = tuple(param.shape), param not in inside
        parts.append(Part("weights", shape, param.element_size(), at_root=at_root))
        if param.requires_grad:
            size = param.element_size() if param.dtype is torch.float32 else widened
            parts.append(Part("gradients", shape, size, at_root=at_root))
    return parts


def _modules(model: nn.Module, shard: Iterable[type | str]) -> list[nn.Module]:
    items = tuple(shard)
    return [
        module
        for name, module in model.named_modules()
        if any(fnmatchcase(name, item) if isinstance(item, str) else isinstance(module, item) for item in items)
    ]
