"""The statistics of sharded tensors, combined over ranks: numbers of elements add up, extremes are maxima.

Each rank counts the part that it stores, and a sampled step sends what was counted as one message. A tensor that several ranks
store whole is counted on one of them. The result is the same on every rank, and that of the whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.backends.consistency import compare_ranks
from halfstep.backends.context import RunContext
from halfstep.backends.fsdp.norms import counts_here
from halfstep.backends.parts import Parts
from halfstep.backends.ranks import ranks_of
from halfstep.kernels.exponents import LARGEST, NUM_COLUMNS, SMALLEST
from halfstep.optim.shards import is_sharded

__all__ = ["ShardStatistics", "shards_of_loop"]


class ShardStatistics:
    """Combines what the ranks counted; every rank must sample the same steps."""

    def __init__(self, params: Mapping[str, Tensor], context: RunContext, parts: Parts | None = None) -> None:
        """`parts` is what the rank steps, where it is not a shard of the parameters themselves."""
        self._group, self._num_ranks = context.process_group, context.world_size
        self._names = tuple(params)
        self.numels = {name: param.numel() for name, param in params.items()} if parts is None else parts.numels
        self._counted = {name for name, p in params.items() if parts is not None or counts_here(p, context.rank)}

    def combine(
        self, tables: Sequence[tuple[Sequence[str], Tensor]], sums: tuple[Sequence[str], Tensor] | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Tables of exponents and sums of updates (float64, a row each), with the names of their rows, of all ranks."""
        own = [self._own(names, table.reshape(-1, NUM_COLUMNS)) for names, table in tables]
        rows = None if sums is None else self._own(sums[0], sums[1])
        packed = torch.cat(
            [part.reshape(-1) for part in own] + ([] if rows is None else [rows.view(torch.int64).reshape(-1)])
        )
        gathered = packed.new_empty(self._num_ranks, packed.numel())
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(gathered.view(-1), packed, group=self._group)
        combined, at = [], 0
        for part in own:
            everyone = gathered[:, at : at + part.numel()].reshape(self._num_ranks, *part.shape)
            table = everyone.sum(0)
            for column in (LARGEST, SMALLEST):
                table[:, column] = everyone[:, :, column].amax(0)
            combined.append(table)
            at += part.numel()
        if rows is None:
            return combined, None
        return combined, gathered[:, at:].contiguous().view(torch.float64).sum(0).reshape(rows.shape)

    def add_up(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Numbers by parameter, of all ranks; only those that are not 0."""
        message = torch.tensor(
            [counts.get(name, 0) * (name in self._counted) for name in self._names], dtype=torch.int64
        )
        dist.all_reduce(message, group=self._group)
        return {name: count for name, count in zip(self._names, message.tolist(), strict=True) if count}

    def _own(self, names: Sequence[str], table: Any) -> Tensor:
        """The rows that count on this rank; the others are 0."""
        mask = torch.tensor([name in self._counted for name in names], device=table.device)
        own: Tensor = torch.where(mask[:, None], table, torch.zeros_like(table))
        return own


def shards_of_loop(params: Mapping[str, Tensor], sampling: str) -> ShardStatistics | None:
    """What combines the statistics of an optimizer in a loop of the user's own; None where no parameter is sharded.

    Every rank must call this: they exchange messages at each sampled step, so their parameters and `sampling` have to be the same.
    """
    if not any(map(is_sharded, params.values())):
        return None
    device = next(iter(params.values())).device
    group = dist.group.WORLD
    context = RunContext(device, rank=dist.get_rank(), world_size=dist.get_world_size(), process_group=group)
    described = {f"parameter {name}": f"{param.dtype} {tuple(param.shape)}" for name, param in params.items()}
    compare_ranks({"watch": sampling} | described, ranks_of(context))
    return ShardStatistics(params, context)
