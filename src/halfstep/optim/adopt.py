"""Adoption: a lean optimizer replaces one of torch's, with its groups, its state and its schedulers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from halfstep.errors import SettingError
from halfstep.events import log_info
from halfstep.optim.lean import LeanOptimizer

__all__ = ["ADOPTS", "adopt", "adopts", "check_adoptable"]

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
        return optimizer
    # The abstract base declares other arguments than the classes that adopt, which all have torch's.
    target: Callable[..., LeanOptimizer] = ADOPTS[type(optimizer)]
    lean = target(optimizer.param_groups, master=master, states=states)
    lean.take_over(optimizer)
    _disable_step(optimizer, lean)
    log_info(
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

    def mark(*_: object) -> None:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - schedulers check it

    lean.register_step_post_hook(mark)
