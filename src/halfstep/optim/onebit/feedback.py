"""Compressed means with the errors of the last step fed back, and stored in the states of the parameters.

    worker_error    in each parameter's state, of its shape: what compression lost of what this rank sent
    server_error    what it lost of the chunk that this rank serves: of each tensor in its own state, of tensors that share a scale in
                    the state of the first

Worker errors are returned, and written by the optimizer's rule with the other moments; server errors are written here. Both stay
what they were in a step that is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.table import copied_to
from halfstep.optim.onebit.allreduce import compressed_allreduce
from halfstep.optim.onebit.wire import Wire

__all__ = ["ERRORS", "reduce_with_feedback"]

ERRORS = ("worker_error", "server_error", "padding_error", "padding")  # what belongs to one rank of so many


def reduce_with_feedback(
    values: Sequence[Tensor],  # fp32
    states: Sequence[dict[str, Any]],  # of the parameters, in the same order
    wire: Wire,
    skip: Tensor | None,
    *,
    fused: bool,  # one scale for all values
    padded: bool,  # compress padding as DeepSpeed does
) -> list[tuple[Tensor, Tensor | None]]:
    """The mean over ranks and the new worker error of each value; with one rank the value itself."""
    results: list[tuple[Tensor, Tensor | None]] = [(value, None) for value in values]
    sendable = [i for i, value in enumerate(values) if value.numel()]
    if wire.num_ranks == 1 or not sendable:
        return results
    units = [sendable] if fused else [[i] for i in sendable]
    owners = [states[unit[0]] for unit in units]
    paddings = [
        _padding(sum(values[i].numel() for i in unit), owner, values[unit[0]].device, wire.num_ranks) if padded else []
        for unit, owner in zip(units, owners, strict=True)
    ]
    reduced = compressed_allreduce(
        [[*(values[i] for i in unit), *padding] for unit, padding in zip(units, paddings, strict=True)],
        [
            [*(states[i]["worker_error"] for i in unit), *(owner["padding_error"] for _ in padding)]
            for unit, owner, padding in zip(units, owners, paddings, strict=True)
        ],
        [owner.get("server_error") for owner in owners],
        wire,
    )
    for unit, owner, padding, outcome in zip(units, owners, paddings, reduced, strict=True):
        for i, mean, error in zip(unit, outcome.means, outcome.worker_errors, strict=False):  # padding comes last
            results[i] = (mean, error)
        _store(owner, "server_error", outcome.server_error, skip)
        if padding:
            _store(owner, "padding_error", outcome.worker_errors[-1], skip)
            _store(owner, "padding", outcome.means[-1] if fused else padding[0], skip)
    return results


def _padding(size: int, owner: dict[str, Any], device: torch.device, num_ranks: int) -> list[Tensor]:
    """The elements that DeepSpeed adds to a tensor of this size and compresses as if they were its own.

    Those of a fused tensor even keep what they received, as a momentum that nothing decays.
    """
    missing = -size % (num_ranks * math.lcm(num_ranks, 8))
    if not missing:
        return []
    for name in ("padding", "padding_error"):
        if name not in owner:
            owner[name] = torch.zeros(missing, device=device)
    return [owner["padding"]]


def _store(state: dict[str, Any], name: str, new: Tensor, skip: Tensor | None) -> None:
    """Replace an entry that may not exist yet, unless the flag is set."""
    if skip is not None:
        before = state.get(name, torch.zeros_like(new))
        new = torch.where(copied_to(skip, new.device) != 0, before, new)
    state[name] = new.clone()
