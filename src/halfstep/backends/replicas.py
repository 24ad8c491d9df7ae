"""Replicas: the same model on every rank, with what the ranks agree on in each window.

Shared by the two backends for replicated models: `wrapped`, whose gradients a DistributedDataParallel of the user reduces,
and `ddp`, which reduces them itself.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from halfstep.backends.agreement import Agreement
from halfstep.backends.base import Backend
from halfstep.backends.context import RunContext
from halfstep.backends.ranks import ProcessRanks, Ranks

__all__ = ["Replicas"]


class Replicas(Backend):
    """Reduced gradients are equal on every rank; weights and flags are agreed."""

    name = "ddp"

    def __init__(self) -> None:
        if dist.is_available() and dist.is_initialized():
            super().__init__(RunContext(rank=dist.get_rank(), world_size=dist.get_world_size()))
        else:
            super().__init__()
        self._agreement: Agreement | None = None  # None with one rank
        self._ranks: Ranks | None = None  # for checkpoints
        self._armed = False  # whether the next backward reduces
        self._due = False  # whether there are gradients that no backward has reduced

    def agree_reference(self, reference: float | Tensor, *, weighted: bool, closing: bool) -> float | Tensor:
        """The largest of all ranks, right before gradients are reduced."""
        if self._agreement is None or not (self._due if closing else self._armed):
            return reference
        return self._agreement.reference(reference, weighted=weighted)

    def reduce_weight(self, weight: float | Tensor) -> float | Tensor:
        """The mean over ranks, as gradients are averaged."""
        return weight if self._agreement is None else self._agreement.weight(weight)

    def total_norm(self, partial: Tensor) -> Tensor:
        """Reduced gradients have the same norm on every rank; whether it is finite travels with the weight."""
        return partial if self._agreement is None else self._agreement.norm(partial)

    def agree(self, found_inf: Tensor) -> Tensor:
        """1 on every rank if it is on any."""
        return found_inf if self._agreement is None else self._agreement.flag(found_inf)

    def ranks(self) -> Ranks:
        """All ranks: each has random numbers of its own, and rank 0 writes."""
        if self._ranks is None:
            self._ranks = Ranks() if self._agreement is None else ProcessRanks(self._context.process_group)
        return self._ranks

    def reset(self) -> None:
        """Expect no gradients."""
        self._armed = self._due = False
        if self._agreement is not None:
            self._agreement.reset()
