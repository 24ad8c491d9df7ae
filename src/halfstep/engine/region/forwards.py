"""Replacing a module's forward by a function, so that copies and pickles of the module keep it and it can be taken back."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

__all__ = ["bind_forward", "unbind_forward"]


def bind_forward(module: nn.Module, forward: Callable[..., Any], inner: str) -> None:
    """Let `forward(module, ...)` run instead of the module's forward; attribute `inner` keeps an earlier one, or is None."""
    setattr(module, inner, vars(module).get("forward"))  # already wrapped by someone else; keep calling theirs
    # Not a pair of hooks: torch.compile can trace a `with` block. A method, not a functools.partial: of those the compiler
    # checks the identity, so each block of a model would be compiled separately, and from the ninth on not at all.
    module.forward = MethodType(forward, module)


def unbind_forward(module: nn.Module, inner: str) -> None:
    """Undo `bind_forward`; nothing for a module without `inner`."""
    if inner in vars(module):
        earlier = vars(module).pop(inner)
        del module.forward
        if earlier is not None:
            module.forward = earlier


def _bound(forward: Callable[..., Any], module: nn.Module) -> MethodType:
    return MethodType(forward, module)


def _reduce_method(method: MethodType) -> Any:
    """Pickle a bound forward as function and module; by default it would be looked up on the module by its name."""
    own = str(getattr(method.__func__, "__module__", "")).startswith("halfstep.") and isinstance(
        method.__self__, nn.Module
    )
    return (_bound, (method.__func__, method.__self__)) if own else method.__reduce__()


copyreg.pickle(MethodType, _reduce_method)
