"""Adoption: a lean optimizer replaces one of torch's, with its groups, its state, its schedulers and its hooks.

The user keeps the stock optimizer, and what they call on it reaches the lean one: `state_dict` and `add_param_group`
through the shared groups and state, `load_state_dict` because it is forwarded, hooks because they run around the lean step
with the stock optimizer as their argument. `step` raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from halfstep.errors import SettingError
from halfstep.events import log_once
from halfstep.optim.convert import convert
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.shards import is_sharded

__all__ = ["ADOPTS", "adopt", "adopts", "check_adoptable", "users_optimizer"]

ADOPTS: dict[type, type[LeanOptimizer]] = {}  # stock class -> the lean class that replaces it


def adopts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a lean class can replace this optimizer exactly."""
    return type(optimizer) in ADOPTS


def check_adoptable(optimizer: torch.optim.Optimizer, *, master: str, states: str) -> None:
    """Raise where `adopt` would; nothing is changed."""
    if isinstance(optimizer, LeanOptimizer):
        for name, wanted in (("master", master), ("states", states)):
            own = getattr(optimizer, name)
            if own not in {"policy", wanted}:
                raise SettingError(
                    f"The optimizer was built with {name}={own!r}, but the policy has {name}={wanted}. Build it with "
                    f"{name}='policy', or write {name}={own} in the precision."
                )
    elif not adopts(optimizer):
        adopted = ", ".join(sorted(stock.__name__ for stock in ADOPTS))
        raise SettingError(
            f"Lean presets need an optimizer with fp32 masters, and {type(optimizer).__name__} has none. Use one of torch's that "
            f"are adopted ({adopted}), halfstep.optim, or a preset with fp32 weights such as bf16 or fp16."
        )
    lean = type(optimizer) if isinstance(optimizer, LeanOptimizer) else ADOPTS[type(optimizer)]
    for group in optimizer.param_groups:
        lean.check_states(group, states)


def adopt(optimizer: torch.optim.Optimizer, *, master: str, states: str) -> LeanOptimizer:
    """A lean optimizer that replaces a stock one, sharing its group dictionaries and its state.

    Schedulers bound to the stock optimizer keep working, because they change the same dictionaries.
    """
    check_adoptable(optimizer, master=master, states=states)
    if isinstance(optimizer, LeanOptimizer):
        optimizer.master, optimizer.states = master, states
        for param, state in list(optimizer.state.items()):  # of steps or a load before there was a policy
            optimizer.state[param] = convert(state, param, optimizer.layout)
        return optimizer
    # The abstract base declares other arguments than the classes that adopt, which all have torch's.
    target: Callable[..., LeanOptimizer] = ADOPTS[type(optimizer)]
    lean = target(optimizer.param_groups, master=master, states=states)
    lean.take_over(optimizer)
    _disable_step(optimizer, lean)
    _forward_loading(optimizer, lean)
    _forward_saving(optimizer, lean)
    _forward_hooks(optimizer, lean)
    log_once(
        f"{type(optimizer).__name__} was adopted as halfstep.optim.{type(lean).__name__} (master={master}, states={states})."
    )
    return lean


def _disable_step(optimizer: torch.optim.Optimizer, lean: LeanOptimizer) -> None:
    """Make `step` of the stock optimizer raise: it would bypass the masters."""
    # The text, not the objects: a cycle would keep weights and states on the GPU until the next garbage collection.
    text = (
        f"This {type(optimizer).__name__} was adopted by halfstep.optim.{type(lean).__name__}, which has the masters; "
        "call engine.step() instead of optimizer.step()."
    )

    def step(*_args: object, **_kwargs: object) -> None:
        raise SettingError(text)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001 - keeps schedulers from warning
    optimizer.step = step  # type: ignore[method-assign,assignment]


def _forward_loading(optimizer: torch.optim.Optimizer, lean: LeanOptimizer) -> None:
    """Make `load_state_dict` of the stock optimizer load into the lean one, which has masters and another layout."""
    # Weak references, because the stock optimizer has this function and the lean one has the stock optimizer.
    stock_ref, lean_ref = weakref.ref(optimizer), weakref.ref(lean)

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        stock, target = stock_ref(), lean_ref()
        assert stock is not None
        if target is None:  # its Engine is gone: the next one adopts whatever torch loads
            type(stock).load_state_dict(stock, state_dict)
            return
        state_dict = state_dict.copy()
        for pre_hook in list(stock._optimizer_load_state_dict_pre_hooks.values()):  # noqa: SLF001 - torch has no other way
            state_dict = pre_hook(stock, state_dict) or state_dict
        before, groups = target.state, [dict(group) for group in target.param_groups]
        try:
            target.load_state_dict(state_dict)
        except BaseException:
            target.state = stock.state = before
            for group, settings in zip(target.param_groups, groups, strict=True):
                group.clear()
                group.update(settings)
            raise
        for post_hook in list(stock._optimizer_load_state_dict_post_hooks.values()):  # noqa: SLF001
            post_hook(stock)

    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _forward_saving(optimizer: torch.optim.Optimizer, lean: LeanOptimizer) -> None:
    """Make `state_dict` of the stock optimizer return whole tensors of sharded parameters: the shared state has their parts."""
    if not any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        return
    stock_ref, lean_ref = weakref.ref(optimizer), weakref.ref(lean)

    def state_dict() -> dict[str, Any]:
        stock, source = stock_ref(), lean_ref()
        assert stock is not None
        return type(stock).state_dict(stock) if source is None else source.state_dict()

    optimizer.state_dict = state_dict  # type: ignore[method-assign]


def _forward_hooks(optimizer: torch.optim.Optimizer, lean: LeanOptimizer) -> None:
    """Run the stock optimizer's step hooks around the lean step; whenever they were registered."""

    def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):  # noqa: SLF001 - torch has no other way
            if hook(optimizer, (optimizer, *args[1:]), kwargs) is not None:
                raise SettingError(
                    f"A step pre-hook of the adopted {type(optimizer).__name__} returned new arguments for step(), which takes none "
                    "here. Return None from the hook."
                )

    def after(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - schedulers check it
        for hook in list(optimizer._optimizer_step_post_hooks.values()):  # noqa: SLF001
            hook(optimizer, (optimizer, *args[1:]), kwargs)

    lean.register_step_pre_hook(before)
    lean.register_step_post_hook(after)


def users_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that the user built: the adopted one behind a lean one, otherwise the optimizer itself."""
    stock = getattr(optimizer, "_stock", None)
    return stock if isinstance(stock, torch.optim.Optimizer) and stock.state is optimizer.state else optimizer
