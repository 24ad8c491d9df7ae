"""Whether the entries of a saved optimizer state fit the parameters: their shapes, and that they can be loaded at all."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfstep.engine.saved.matching import MatchedState, by_number, class_name, group_sizes, tensors_by_name
from halfstep.engine.saved.rollback import ObjectCopy, loads_itself
from halfstep.errors import SettingError
from halfstep.kernels.layout import MASTER_ENTRIES
from halfstep.kernels.moments8 import num_blocks
from halfstep.optim.adopt import ADOPTS, users_optimizer
from halfstep.optim.convert import without_steps
from halfstep.optim.exchange import Exchanging
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.shards import in_files, is_sharded, placed

__all__ = ["check_entries", "load_entries", "optimizer_state"]

_OTHER_SHAPES = (torch.optim.Adafactor, torch.optim.LBFGS)  # whose states do not have the shape of the parameter


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer; raises for one that could not be loaded again."""
    facing = users_optimizer(optimizer)
    saved: dict[str, Any] = facing.state_dict()
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    foreign = loads_itself(facing) and not type(facing).__module__.startswith("halfstep.")
    if foreign or group_sizes(saved) != sizes:
        before = ObjectCopy(facing, tensors=True)
        try:
            facing.load_state_dict(copy.deepcopy(saved))
        except Exception as error:
            raise SettingError(
                f"{type(facing).__name__} cannot load the state that its state_dict() returns ({type(error).__name__}: {error}), so a checkpoint "
                "of it could never be resumed. Use another optimizer, or correct its load_state_dict()."
            ) from error
        finally:
            before.restore()
    return in_files(saved) if isinstance(optimizer, LeanOptimizer) else saved


def check_entries(
    optimizer: torch.optim.Optimizer, matched: MatchedState, params: Mapping[str, Tensor], *, known_class: bool
) -> None:
    """Raise for entries that do not have the shape of their parameter, or belong to another class."""
    facing = users_optimizer(optimizer)
    elementwise = isinstance(optimizer, LeanOptimizer) or type(facing).__module__.startswith("torch.optim")
    elementwise = elementwise and not isinstance(facing, _OTHER_SHAPES)
    target = type(optimizer) if isinstance(optimizer, LeanOptimizer) else ADOPTS.get(type(facing))
    own = getattr(target, "moments", None)
    for name, entry in tensors_by_name(matched).items():
        param = params[name]
        for key, value in entry.items():
            if value.numel() == 1 or not (elementwise or key in MASTER_ENTRIES):
                continue
            if isinstance(optimizer, Exchanging) and key in set(optimizer.rank_states) - set(optimizer.moments):
                continue  # of the size of a part that this rank serves
            scales = key.endswith("_scale") and key.removesuffix("_scale") in entry
            expected = (num_blocks(param.numel()),) if scales else tuple(param.shape)
            if tuple(value.shape) != expected:
                raise SettingError(
                    f"The saved {key} of {name} has the shape {tuple(value.shape)}, and {expected} is needed. The state does not belong to "
                    "this model."
                )
            if not known_class and own and not scales and key not in {*own, *MASTER_ENTRIES}:
                raise SettingError(
                    f"The saved state of {name} has {key}, which {class_name(optimizer)} does not use: it was saved by another class. Build "
                    "the Engine with the optimizer it was saved with."
                )


def load_entries(
    optimizer: torch.optim.Optimizer, matched: MatchedState, groups: Sequence[dict[str, Any]] | None, *, exact: bool
) -> None:
    """Load a state with these groups; with `exact`, its tensors have the dtypes they were saved with."""
    facing = users_optimizer(optimizer)
    adopter = ADOPTS.get(type(facing))
    if not isinstance(optimizer, LeanOptimizer) and adopter is not None and not adopter.counts_steps:
        matched = replace(matched, saved={**matched.saved, "state": without_steps(matched.saved["state"])})
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not isinstance(optimizer, LeanOptimizer) and any(map(is_sharded, params)):
        owners = dict(zip(by_number(matched), params, strict=True))
        entries = {
            number: {key: placed(value, owners[number]) for key, value in entry.items()} if number in owners else entry
            for number, entry in matched.saved["state"].items()
        }
        matched = replace(matched, saved={**matched.saved, "state": entries})
    facing.load_state_dict(matched.saved if groups is None else {**matched.saved, "param_groups": list(groups)})
    if exact and isinstance(optimizer, LeanOptimizer):
        for number, param in zip(by_number(matched), params, strict=True):
            has_master = optimizer.layout.master_entry(param.dtype) is not None and param.requires_grad
            if has_master and not matched.saved["state"].get(number, {}).keys() & set(MASTER_ENTRIES):
                optimizer.set_master(
                    param, param.detach().float()
                )  # the rest of the weight that was here before is void
    if not exact or isinstance(optimizer, LeanOptimizer) or loads_itself(facing):
        return
    for number, param in zip(by_number(matched), params, strict=True):
        for key, value in matched.saved["state"].get(number, {}).items():
            loaded = optimizer.state[param][key]
            # torch casts integers to the dtype of the weights, takes strings apart and forgets the length of deques
            if isinstance(value, str | bytes):
                optimizer.state[param][key] = value
            elif isinstance(value, deque):
                optimizer.state[param][key] = deque(loaded, value.maxlen)
            elif isinstance(value, Tensor) and key != "step" and loaded.dtype is not value.dtype:
                optimizer.state[param][key] = value.to(param.device, copy=True)
