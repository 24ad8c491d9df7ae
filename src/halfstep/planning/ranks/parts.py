"""What sharding divides of a model: its weights and gradients, and the units in which FSDP2 gathers them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from halfstep.backends.fsdp.sharding import named_units
from halfstep.engine.casting import fp32_units
from halfstep.engine.repeats import repeated_blocks
from halfstep.planning.ranks.shards import Part
from halfstep.precision.formats import FORMATS
from halfstep.precision.policy import Policy

__all__ = ["Units", "find_units", "model_parts"]


@dataclass(frozen=True)
class Units:
    """Elements that FSDP2 gathers at once."""

    largest: int  # of the largest module that `Job.shard` names, or of the largest repeated block; 0 if there is none
    root: int  # of everything outside of them


def find_units(model: nn.Module, shard: Iterable[type | str], policy: Policy) -> Units:
    """The units of a model: the modules that `shard` names, by default its repeated blocks, and then the root."""
    modules = _modules(model, shard, policy)
    inside = {p for module in modules for p in module.parameters()}
    root = sum(p.numel() for p in model.parameters() if p not in inside)
    return Units(max((sum(p.numel() for p in module.parameters()) for module in modules), default=0), root)


def model_parts(model: nn.Module, shard: Iterable[type | str], policy: Policy, accumulate: int) -> list[Part]:
    """Weights and gradients of a model that the policy was applied to."""
    inside = {p for module in _modules(model, shard, policy) for p in module.parameters()}
    widened = int(FORMATS[policy.grads_format(accumulate)].bytes)
    parts = []
    for param in model.parameters():
        shape, at_root = tuple(param.shape), param not in inside
        parts.append(Part("weights", shape, param.element_size(), at_root=at_root))
        if param.requires_grad:
            size = param.element_size() if param.dtype is torch.float32 else widened
            parts.append(Part("gradients", shape, size, at_root=at_root))
    return parts


def _modules(model: nn.Module, shard: Iterable[type | str], policy: Policy) -> list[nn.Module]:
    """The units of the FSDP backend, those of modules that stay in fp32 included."""
    items = tuple(shard)
    blocks = [block for stack in repeated_blocks(model) for block in stack.modules]
    return [*(named_units(model, items) if items else blocks), *fp32_units(model, policy)[0]]
