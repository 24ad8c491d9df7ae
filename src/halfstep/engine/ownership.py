"""What the user may still do with an optimizer while an Engine steps it.

`state_dict`, `load_state_dict`, schedulers, hooks and changed settings work. A new parameter group does not: the Engine has cast,
adopted and registered the parameters it was built with, and others would be stepped unchecked and unclipped.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from halfstep.engine.saved.matching import built_by_user
from halfstep.engine.saved.rollback import loads_itself
from halfstep.errors import SettingError
from halfstep.kernels.layout import MASTER_ENTRIES

__all__ = ["check_ownable", "keep_step_path", "own_optimizers"]

_STEP_PATH = ("fused", "foreach")  # how a step is computed, not what


def check_ownable(optimizers: Sequence[torch.optim.Optimizer], *, lean: bool, release: bool) -> None:
    """Raise for states that these optimizers cannot continue from, and hooks that would never run."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        entries = {entry for state in optimizer.state.values() if isinstance(state, dict) for entry in state}
        lean_entries = sorted(e for e in entries if e in MASTER_ENTRIES or f"{e}_scale" in entries)
        if not lean and lean_entries:
            raise SettingError(
                f"{name} has the state of a lean run ({', '.join(lean_entries)}), which this precision cannot continue from. Use the lean "
                "precision it was trained with, or save that run with Engine.save and load it with Engine.load, which converts it."
            )
        hooks = [getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
        if release and any(hooks):
            raise SettingError(
                f"{name} has step hooks, and with gradient_release there is no step() to run them around: parameters are updated inside "
                "backward. Remove the hooks, or gradient_release."
            )


def own_optimizers(optimizers: Sequence[torch.optim.Optimizer], undo: contextlib.ExitStack) -> None:
    """Until `undo`, reject new groups, and let a loaded state keep the way these optimizers are stepped."""
    for optimizer in optimizers:
        if not loads_itself(optimizer):
            undo.callback(optimizer.register_load_state_dict_pre_hook(_keep_step_path).remove)
        for facing in {id(o): o for o in (optimizer, built_by_user(optimizer))}.values():
            facing.add_param_group = _rejection(facing, undo)  # type: ignore[method-assign]
            undo.callback(vars(facing).pop, "add_param_group", None)


def keep_step_path(groups: Sequence[dict[str, Any]], optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Saved groups with this optimizer's own choice of fused or foreach."""
    own = optimizer.param_groups
    return [theirs | {k: mine[k] for k in _STEP_PATH if k in mine} for theirs, mine in zip(groups, own, strict=True)]


def _keep_step_path(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    groups = state_dict.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        return None  # load_state_dict explains it
    return state_dict | {"param_groups": keep_step_path(groups, optimizer)}


def _rejection(optimizer: torch.optim.Optimizer, undo: contextlib.ExitStack) -> Callable[..., None]:
    # No strong references: a cycle would keep weights and states on the GPU until the next garbage collection.
    optimizer_ref, engine_alive = weakref.ref(optimizer), weakref.ref(undo)

    def add_param_group(param_group: dict[str, Any]) -> None:
        target = optimizer_ref()
        assert target is not None
        if engine_alive() is None:  # dropped without close()
            type(target).add_param_group(target, param_group)
            return
        raise SettingError(
            f"add_param_group() on the {type(target).__name__} of an Engine: the new parameters would be neither cast nor checked nor "
            "clipped. Add the group before Engine(...), or call engine.close(), add it and build a new Engine."
        )

    return add_param_group
