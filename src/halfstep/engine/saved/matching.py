"""Which saved optimizer, group, parameter and scheduler belongs to which of this run: by name, never by position.

An optimizer's state counts its parameters, so its meaning depends on the order in which they were passed. A resumed run
may pass them in another order, list its groups or its optimizers otherwise, or wrap the model. So every state has the
names along with the numbers, and is put into this run's order before it is loaded. Settings such as the learning rate
travel with their group. What is not divided into the same optimizers and groups is rejected, with the names that differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.checkpoint.names import clean_names, match_names
from halfstep.errors import SettingError
from halfstep.hardware.units import few
from halfstep.optim.adopt import users_optimizer
from halfstep.optim.masters import Fp32Masters

__all__ = [
    "MatchedState",
    "ModelNames",
    "built_by_user",
    "by_number",
    "class_name",
    "group_names",
    "group_sizes",
    "match_optimizers",
    "tensors_by_name",
]


@dataclass(frozen=True)
class ModelNames:
    """A model's own names for its parameters; a tied one has several."""

    own: dict[int, str]  # id of a parameter -> its first name
    every: dict[str, str]  # any of its names -> its first name

    @classmethod
    def of(cls, module: nn.Module) -> ModelNames:
        """The names in `module`, without wrappers."""
        named = list(module.named_parameters(remove_duplicate=False))
        clean = clean_names(module, [name for name, _ in named])
        own: dict[int, str] = {}
        for name, param in named:
            own.setdefault(id(param), clean[name])
        return cls(own, {clean[name]: own[id(param)] for name, param in named})

    def resolve(self, saved: Sequence[str]) -> list[str]:
        """Saved names as this model's first names; those it does not have stay as they are."""
        matches = match_names(saved, self.every)
        return [self.every[matches[name]] if name in matches else name for name in saved]


@dataclass(frozen=True)
class MatchedState:
    """A saved optimizer state in the order of one of this run's optimizers."""

    index: int  # of the saved optimizer
    groups: tuple[int, ...]  # the saved group for each own group
    names: list[str]  # of the parameters, in this order
    saved: dict[str, Any]


def built_by_user(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that the user built: the one inside, where one of Halfstep's replaced or wrapped it."""
    return optimizer.inner if isinstance(optimizer, Fp32Masters) else users_optimizer(optimizer)


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """The name of the class that the user chose; stock and lean classes of one rule have the same."""
    return type(built_by_user(optimizer)).__name__


def group_names(names: ModelNames, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of an optimizer's parameters, by group."""
    return [[names.own[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def group_sizes(saved: Any) -> list[int] | None:
    """The sizes of a state's groups, if it numbers its parameters by group as torch's own optimizers do; else None."""
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list) or not isinstance(saved.get("state"), Mapping):
        return None
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
        return None
    return [len(group["params"]) for group in groups]


def match_optimizers(
    names: ModelNames, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Any]
) -> list[MatchedState]:
    """For each optimizer, the saved state of the same parameters in this optimizer's order."""
    if len(state["optimizers"]) != len(optimizers):
        raise SettingError(
            f"The state has {len(state['optimizers'])} optimizers and this engine {len(optimizers)}; build it as it was when it was saved."
        )
    saved_names = [names.resolve(saved) for saved in state["names"]]
    classes = state.get("optimizer_classes") or [None] * len(saved_names)
    matches = []
    for position, optimizer in enumerate(optimizers):
        own = group_names(names, optimizer)
        index = _same_names(own, saved_names, position, class_name(optimizer))
        if classes[index] not in {None, class_name(optimizer)}:
            raise SettingError(
                f"The state of {few(saved_names[index], 2)} was saved by {classes[index]}, and this engine has {class_name(optimizer)}: the "
                f"moments of one mean nothing to the other. Build the Engine with {classes[index]}, or load only the weights, from the "
                "checkpoint's model.safetensors."
            )
        matches.append(_in_own_order(state["optimizers"][index], index, saved_names[index], own, class_name(optimizer)))
    return matches


def _same_names(own: list[list[str]], saved: list[list[str]], position: int, name: str) -> int:
    flat = sorted(n for group in own for n in group)
    for index, names in enumerate(saved):
        if sorted(names) == flat:
            return index
    closest = max(range(len(saved)), key=lambda i: (len(set(saved[i]) & set(flat)), i == position))
    raise SettingError(
        f"The state was saved for other parameters than those of optimizer {position} ({name}): "
        f"{_differences(saved[closest], flat)}. Build the optimizers from the same parameters as when it was saved."
    )


def _differences(saved: Sequence[str], own: Sequence[str]) -> str:
    only_saved, only_own = sorted(set(saved) - set(own)), sorted(set(own) - set(saved))
    sides = [f"only in the state: {few(only_saved)}"] if only_saved else []
    sides += [f"only in the engine: {few(only_own)}"] if only_own else []
    return "; ".join(sides) or "names that occur twice, because weights are tied on one side only"


def _in_own_order(saved: dict[str, Any], index: int, names: list[str], own: list[list[str]], kind: str) -> MatchedState:
    flat = [name for group in own for name in group]
    sizes = group_sizes(saved)
    if sizes is None or sum(sizes) != len(names) or (names != flat and _has_more(saved)):
        if names != flat:
            raise SettingError(
                f"The state of {kind} has a layout of its own, so it can only be loaded with its parameters in the order in which it was "
                f"saved: {few(names)}. Here they are {few(flat)}."
            )
        return MatchedState(index, tuple(range(len(own))), names, saved)
    rest = iter(names)
    saved_groups = [[next(rest) for _ in range(size)] for size in sizes]
    order = _match_groups(saved_groups, own, kind)
    number = dict(zip(names, (i for group in saved["param_groups"] for i in group["params"]), strict=True))
    groups = [
        {k: v for k, v in saved["param_groups"][i].items() if k != "param_names"}
        | {"params": [number[n] for n in mine]}
        for i, mine in zip(order, own, strict=True)
    ]
    return MatchedState(index, order, flat, {**saved, "param_groups": groups})


def _has_more(saved: Mapping[str, Any]) -> bool:
    """Whether a state has more than numbered entries and groups, which may depend on the order of the parameters."""
    return any(
        isinstance(v, Mapping | list | tuple | Tensor) for k, v in saved.items() if k not in {"state", "param_groups"}
    )


def _match_groups(saved: list[list[str]], own: list[list[str]], kind: str) -> tuple[int, ...]:
    left = list(range(len(saved)))
    order = []
    for position, names in enumerate(own):
        same = [i for i in left if sorted(saved[i]) == sorted(names)]
        if not same:
            closest = max(range(len(saved)), key=lambda i: len(set(saved[i]) & set(names)), default=0)
            raise SettingError(
                f"{kind} was saved with parameter groups of {[len(group) for group in saved]} tensors and has {[len(group) for group in own]} "
                f"now. Group {position} differs from the saved group {closest}: {_differences(saved[closest], names)}. "
                "Divide the parameters into the same groups; their order does not matter."
            )
        left.remove(same[0])
        order.append(same[0])
    if left:
        raise SettingError(f"{kind} was saved with {len(saved)} parameter groups and has {len(own)} now.")
    return tuple(order)


def by_number(matched: MatchedState) -> dict[Any, str]:
    """The name of each number in a matched state; empty where it has another layout than torch's."""
    sizes = group_sizes(matched.saved)
    if sizes is None or sum(sizes) != len(matched.names):
        return {}
    return dict(
        zip((i for group in matched.saved["param_groups"] for i in group["params"]), matched.names, strict=True)
    )


def tensors_by_name(matched: MatchedState) -> dict[str, dict[str, Tensor]]:
    """The tensors in each parameter's entry."""
    numbers = by_number(matched)
    entries = {numbers[i]: entry for i, entry in matched.saved["state"].items() if i in numbers} if numbers else {}
    return {name: {k: v for k, v in entry.items() if isinstance(v, Tensor)} for name, entry in entries.items()}
