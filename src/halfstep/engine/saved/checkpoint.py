"""A state of the Engine as a checkpoint directory stores it: weights, the rest of the state, random-number state, extra.

A checkpoint is what a run returns to, so weights that are not finite are not written unless the caller insists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.checkpoint.directory import Checkpoint
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.errors import SettingError
from halfstep.hardware.units import few

__all__ = ["checkpoint_parts", "engine_state", "nonfinite_weights", "restore_extra"]


def checkpoint_parts(
    state: dict[str, Any], extra: dict[str, Any], *, allow_nonfinite: bool = False
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Weights, state tree and meta values of a checkpoint, from `state_of` and what the caller adds.

    Raises where a parameter or a master is not finite, unless that is allowed; buffers may contain any number.
    """
    if not allow_nonfinite:
        _check_finite(state)
    state = dict(state)
    weights = state.pop("model")
    meta = {"policy": state["policy"], "truth": state["truth"], "counters": state["counters"]}
    return weights, {"engine": state, "rng": rng_state(), "extra": extra}, meta


def nonfinite_weights(state: dict[str, Any]) -> dict[str, str]:
    """The parameters and masters of a state that are not finite, by name, with how many of their numbers are not."""
    weights: dict[str, Tensor] = {name: state["model"][name] for name in state["params"]}
    for names, saved in zip(state["names"], state["optimizers"], strict=True):
        numbers = [i for group in saved.get("param_groups", []) for i in group["params"]]
        entries = zip(names, numbers, strict=True) if len(numbers) == len(names) else ()
        masters = {name: saved["state"].get(i, {}).get("master") for name, i in entries}
        weights |= {f"{name} (its master)": master for name, master in masters.items() if master is not None}
    floating = {name: w for name, w in weights.items() if w.is_floating_point() or w.is_complex()}
    # One number per tensor, read together: a network has hundreds of tensors, and each read waits for the device.
    sums = [torch.isfinite(w).logical_not().sum() for w in floating.values()]
    counts = torch.stack([count.to(sums[0].device) for count in sums]).tolist() if sums else []
    return {name: f"{n} of {floating[name].numel()}" for name, n in zip(floating, counts, strict=True) if n}


def _check_finite(state: dict[str, Any]) -> None:
    bad = [f"{name} ({count})" for name, count in nonfinite_weights(state).items()]
    if bad:
        raise SettingError(
            f"The checkpoint was not written: {len(bad)} weights and masters have values that are not finite: {few(bad)}. Continue "
            "from an earlier checkpoint; save(..., allow_nonfinite=True) writes it all the same, to examine it."
        )


def engine_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The state that `load_state` takes, from a checkpoint that an Engine saved."""
    if not isinstance(checkpoint.state, dict) or not {"engine", "rng", "extra"} <= checkpoint.state.keys():
        raise SettingError(f"{checkpoint.path} is a checkpoint, but not one that an Engine saved.")
    state: dict[str, Any] = checkpoint.state["engine"] | {"model": checkpoint.weights}
    return state


def restore_extra(checkpoint: Checkpoint) -> dict[str, Any]:
    """Restore the random-number state of a checkpoint; returns the extra values that were saved with it."""
    restore_rng(checkpoint.state["rng"])
    extra: dict[str, Any] = checkpoint.state["extra"]
    return extra
