"""The norm of gradients that are spread over ranks: each value counts once, whatever the placements.

    norm^2 = sum over ranks of the squares of the gradients that count on that rank

A shard counts on the rank that stores it. A value that several ranks store counts on one of them: the first along every
dimension of the mesh that replicates, in the mesh that contains the run's first rank (a mesh may be a part of the run, as
that of data parallelism next to tensor parallelism, and then the others store copies). Plain parameters count on the first rank.

The gradients that do not count here are still read: one that is not finite must skip the step of every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.gradstats import total_norm
from halfstep.optim.shards import is_sharded

__all__ = ["counts_here", "partial_norms"]


def counts_here(param: Any, rank: int) -> bool:
    """Whether the values of `param` that `rank` stores are counted on it."""
    if not is_sharded(param):
        return rank == 0
    ranks = param.device_mesh.mesh
    position = (ranks == rank).nonzero().flatten().tolist()
    if not position or not bool((ranks == 0).any()):
        return False
    return all(not place.is_replicate() or at == 0 for place, at in zip(param.placements, position, strict=True))


def partial_norms(
    gradients: Mapping[str, Tensor], counted: frozenset[str], device: torch.device, tables: dict[Any, Any]
) -> tuple[Tensor, Tensor]:
    """The norms of the gradients that count on this rank, and of the others."""
    mine = [grad for name, grad in gradients.items() if name in counted]
    others = [grad for name, grad in gradients.items() if name not in counted]
    norms = [
        total_norm(grads, device, tables.setdefault(kind, {})) if grads else torch.zeros((), device=device)
        for kind, grads in (("counted", mine), ("copies", others))
    ]
    return norms[0], norms[1]
