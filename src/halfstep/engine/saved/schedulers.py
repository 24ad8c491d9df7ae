"""The states of schedulers: which saved one belongs to which, and in which order of groups.

A scheduler stores one number per group of its optimizer, in the order of the groups. Where groups changed places, so do
these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from halfstep.engine.saved.matching import MatchedState, built_by_user
from halfstep.errors import SettingError

__all__ = ["match_schedulers", "optimizer_of", "scheduler_states"]

# What torch's and timm's schedulers store per group.
_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas", "base_momentums", "max_momentums", "base_values"}
)


def optimizer_of(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> int | None:
    """The index of the optimizer that a scheduler changes; None if that is not known."""
    target = getattr(scheduler, "optimizer", None)
    for index, optimizer in enumerate(optimizers):
        if target is not None and (target is optimizer or target is built_by_user(optimizer)):
            return index
    return None


def scheduler_states(schedulers: Sequence[Any]) -> list[Any]:
    """The states of the schedulers; raises for one that could not load its state again."""
    for scheduler in schedulers:
        missing = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(scheduler, m, None))]
        if missing:
            raise SettingError(
                f"The scheduler {type(scheduler).__name__} has no {' and no '.join(missing)}, so a checkpoint could not restore it. Add "
                "both methods, as torch's schedulers have them."
            )
    return [scheduler.state_dict() for scheduler in schedulers]


def match_schedulers(
    schedulers: Sequence[Any],
    optimizers: Sequence[torch.optim.Optimizer],
    matched: Sequence[MatchedState],
    state: Mapping[str, Any],
) -> list[Any]:
    """For each scheduler, the saved state of the same class and optimizer, in the order of this run's groups."""
    saved = state["schedulers"]
    if len(saved) != len(schedulers):
        raise SettingError(
            f"The state has {len(saved)} schedulers and this engine {len(schedulers)}; build it as it was when it was saved."
        )
    classes = state.get("scheduler_classes") or [None] * len(saved)
    owners = state.get("scheduler_optimizers") or [None] * len(saved)
    reordered = [m.index for m in matched] != list(range(len(matched)))
    if reordered and len(saved) > 1 and "scheduler_optimizers" not in state:
        raise SettingError(
            "The state lists its optimizers in another order and does not record which scheduler belongs to which. Pass the optimizers and "
            "schedulers in the order of the run that saved it."
        )
    left, states = list(range(len(saved))), []
    for position, scheduler in enumerate(schedulers):
        owner = optimizer_of(scheduler, optimizers)
        source = None if owner is None else matched[owner].index
        name = type(scheduler).__name__
        same = [
            i
            for i in left
            if classes[i] in {None, name} and (owners[i] is None or source is None or owners[i] == source)
        ]
        if not same:
            others = ", ".join(f"{classes[i]} of optimizer {owners[i]}" for i in left)
            raise SettingError(
                f"Scheduler {position} is {name} of optimizer {source} in the state, which has {others} instead. Build the Engine with "
                "the schedulers that it was saved with."
            )
        left.remove(same[0])
        order = tuple(range(1)) if owner is None else matched[owner].groups
        states.append(_in_own_order(saved[same[0]], order, scheduler))
    return states


def _in_own_order(saved: Any, order: tuple[int, ...], scheduler: Any) -> Any:
    """A scheduler's state after the groups of its optimizer changed places."""
    if order == tuple(range(len(order))) or not isinstance(saved, dict):
        return saved
    moved = dict(saved)
    for key, value in saved.items():
        if isinstance(value, list | tuple) and len(value) == len(order) and key in _PER_GROUP:
            moved[key] = type(value)(value[i] for i in order)
        elif key == "_schedulers":  # of SequentialLR and ChainedScheduler
            moved[key] = type(value)(_in_own_order(inner, order, scheduler) for inner in value)
        elif isinstance(value, list | tuple) and len(value) == len(order) and not _is_torchs(scheduler):
            raise SettingError(
                f"The groups changed their order since the state was saved, and {type(scheduler).__name__} has {key!r} with {len(value)} "
                "values, which may be one per group. Pass the groups in the order in which they were saved."
            )
    return moved


def _is_torchs(scheduler: Any) -> bool:
    return type(scheduler).__module__.startswith("torch.")
