"""A state of the Engine as a checkpoint directory stores it: weights, the rest of the state, random-number state, extra.

A checkpoint is what a run returns to, so weights that are not finite are not written unless the caller insists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.backends.ranks import Ranks
from halfstep.checkpoint.boxes import is_first_copy
from halfstep.checkpoint.directory import Checkpoint
from halfstep.checkpoint.rng import derive_rng, restore_rng, rng_state
from halfstep.checkpoint.stored import StoredTensor, read_all
from halfstep.engine.saved.own import merge_own, own_state
from halfstep.errors import SettingError
from halfstep.events import log_info
from halfstep.hardware.units import few
from halfstep.optim.shards import local

__all__ = ["checkpoint_parts", "engine_state", "nonfinite_weights", "restore_extra", "with_own"]

_OWN = "own"  # of a rank, next to its random-number state


def checkpoint_parts(state: dict[str, Any], extra: dict[str, Any], nonfinite: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `Saver.save`, from `state_of` and what the caller adds; raises if there are `nonfinite_weights`."""
    if nonfinite:
        bad = [f"{name} ({count})" for name, count in nonfinite.items()]
        raise SettingError(
            f"The checkpoint was not written: {len(bad)} weights and masters have values that are not finite: {few(bad)}. Continue "
            "from an earlier checkpoint; save(..., allow_nonfinite=True) writes it all the same, to examine it."
        )
    state = dict(state)
    own = state.pop(_OWN, {})
    return {
        "weights": state.pop("model"),
        "meta": {"policy": state["policy"], "truth": state["truth"], "counters": state["counters"]},
        "state": {"engine": state},
        "own": {"rng": rng_state(), "extra": extra} | ({_OWN: own} if own else {}),
    }


def nonfinite_weights(state: dict[str, Any], ranks: Ranks | None = None) -> dict[str, str]:
    """The parameters and masters that are not finite on any rank, by name, with how many of their numbers are not.

    Buffers may contain any number.
    """
    ranks = ranks or Ranks()
    weights: dict[str, Tensor] = {name: state["model"][name] for name in state["params"]}
    for names, saved in zip(state["names"], state["optimizers"], strict=True):
        numbers = [i for group in saved.get("param_groups", []) for i in group["params"]]
        entries = zip(names, numbers, strict=True) if len(numbers) == len(names) else ()
        masters = {name: saved["state"].get(i, {}).get("master") for name, i in entries}
        weights |= {f"{name} (its master)": master for name, master in masters.items() if master is not None}
    floating = {
        name: w
        for name, w in weights.items()
        if (w.is_floating_point() or w.is_complex()) and is_first_copy(w, ranks.rank)
    }
    # One number per tensor, read together: a network has hundreds of tensors, and each read waits for the device.
    sums = [torch.isfinite(local(w)).logical_not().sum() for w in floating.values()]
    counts = torch.stack([count.to(sums[0].device) for count in sums]).tolist() if sums else []
    own = {name: count for name, count in zip(floating, counts, strict=True) if count}
    totals: dict[str, int] = {}
    for theirs in ranks.gather(own):
        for name, count in theirs.items():
            totals[name] = totals.get(name, 0) + count
    return {name: f"{totals[name]} of {w.numel()}" for name, w in weights.items() if name in totals}


def engine_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The state that `load_state` takes, from a checkpoint that an Engine saved."""
    if not isinstance(checkpoint.state, dict) or not {"engine", "rng", "extra"} <= checkpoint.state.keys():
        raise SettingError(f"{checkpoint.path} is a checkpoint, but not one that an Engine saved.")
    state: dict[str, Any] = checkpoint.state["engine"] | {"model": checkpoint.weights}
    return merge_own(state, checkpoint.state.get(_OWN, {}))


def with_own(state: dict[str, Any], optimizers: Sequence[torch.optim.Optimizer], ranks: Ranks) -> dict[str, Any]:
    """A state of `state_of` with the part that only this rank has, for `checkpoint_parts`."""
    own = own_state(optimizers, state, rank=ranks.rank, num_ranks=ranks.num_ranks)
    return state | ({_OWN: own} if own else {})


def restore_extra(checkpoint: Checkpoint, ranks: Ranks | None = None) -> dict[str, Any]:
    """Restore the random-number state of this rank; returns the extra values that were saved with it.

    Another number of ranks than that of the checkpoint gets new random numbers, other ones on every rank.
    """
    ranks = ranks or Ranks()
    saved = read_all(checkpoint.state["rng"], StoredTensor.read)
    if checkpoint.num_ranks == ranks.num_ranks:
        restore_rng(saved)
    else:
        derive_rng(saved, ranks.rank, ranks.num_ranks)
        log_info(
            f"Checkpoint has RNG state for {checkpoint.num_ranks} ranks but {ranks.num_ranks} are running; every rank continues with other "
            "random numbers, seeded from the state of rank 0, and the extra values are those of rank 0."
        )
    extra: dict[str, Any] = read_all(checkpoint.state["extra"], StoredTensor.read)
    return extra
