"""Small messages between the hosts of a run, which no GPU waits for.

They are sent as CPU tensors through a gloo group of their own, so that they cannot mix with the gradients'. Every rank must call
the same methods in the same order.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.backends.context import RunContext

__all__ = ["Messages", "gather_into", "messages_of"]


class Messages:
    """The channel of one rank to the others."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def gather_numbers(self, *numbers: int) -> list[list[int]]:
        """The numbers of every rank, by rank."""
        received = torch.empty(self.num_ranks, len(numbers), dtype=torch.int64)
        gather_into(received, torch.tensor([numbers], dtype=torch.int64), self.group)
        values: list[list[int]] = received.tolist()
        return values

    def gather(self, value: Any) -> list[Any]:
        """A picklable value of every rank, by rank."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any, source: int) -> Any:
        """The picklable value of the rank `source`, on every rank; its tensors arrive on the CPU."""
        values = [pytree.tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, value)]
        dist.broadcast_object_list(values, group=self.group, group_src=source)
        return values[0]


def gather_into(received: Tensor, own: Tensor, group: Any) -> None:
    """All-gather tensors into one, by rank."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gather(received, own, group=group)


def messages_of(run: RunContext, timeout: timedelta | None = None) -> Messages | None:
    """The channel between the ranks of a run; None for one process. The first call for a run sets its timeout."""
    if run.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    group = run.process_group or dist.group.WORLD
    if group not in _created:
        _created[group] = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", timeout=timeout)
    return Messages(_created[group])


_created: dict[Any, Any] = {}  # by the run's own group
