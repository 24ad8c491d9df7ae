"""What one rank of replicas has for itself, where an optimizer exchanges values compressed: errors, and between two synchronizations weights.

Rank 0 writes its whole state as that of all ranks. The others add what differs from it:

    optimizers   the entries of `rank_states`, masters while the weights differ, and the groups, which name the rank
    model        the trainable weights, while they differ
    averages     the EMA, where weights can differ: it follows those of its own rank

A run with as many ranks merges the part of each rank into the state again. With another number every rank starts from the state of
rank 0, and the optimizer resets its errors and logs that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from halfstep.kernels.layout import MASTER_ENTRIES
from halfstep.optim.exchange import exchanging_of

__all__ = ["merge_own", "own_state"]


def own_state(
    optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Any], *, rank: int, num_ranks: int
) -> dict[str, Any]:
    """The parts of a state of this rank that differ from those of rank 0; empty where nothing can."""
    optimizer = exchanging_of(optimizers)
    if optimizer is None or num_ranks == 1 or rank == 0:
        return {}
    names = optimizer.rank_states + (() if optimizer.synchronized else MASTER_ENTRIES)
    own: dict[str, Any] = {"optimizers": []}
    for saved in state["optimizers"]:
        entries = {
            number: {name: value for name, value in entry.items() if name in names}
            for number, entry in saved["state"].items()
        }
        own["optimizers"].append({"state": entries, "param_groups": saved["param_groups"]})
    if not optimizer.synchronized:
        own["model"] = {name: state["model"][name] for name in state["params"]}
    if optimizer.weights_differ and state["ema"] is not None:
        own["averages"] = state["ema"]["averages"]
    return own


def merge_own(state: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The state of rank 0 with the parts of this rank in the place of its own."""
    if not own:
        return state
    optimizers = []
    for saved, mine in zip(state["optimizers"], own["optimizers"], strict=True):
        entries = {number: entry | mine["state"].get(number, {}) for number, entry in saved["state"].items()}
        optimizers.append({**saved, "state": entries, "param_groups": mine["param_groups"]})
    merged = {**state, "optimizers": optimizers, "model": {**state["model"], **own.get("model", {})}}
    if "averages" in own:
        merged["ema"] = {**state["ema"], "averages": own["averages"]}
    return merged
