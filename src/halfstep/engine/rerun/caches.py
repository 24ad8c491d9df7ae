"""Key-value caches among a block's arguments: transformers' models create one by default, in training too.

A block appends its keys and values to the cache under its own layer number. A second run would append them again, and
compiled code would be specific to the layer. Training does not read the cache, so blocks get None instead.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["find_cache_classes", "has_cache", "without_caches"]

_classes: tuple[type, ...] = ()


def find_cache_classes() -> None:
    """Look up transformers' class of caches, if transformers is loaded; called once for a model, outside compiled code."""
    global _classes  # noqa: PLW0603 - a constant of the process as soon as transformers is loaded
    module = sys.modules.get("transformers.cache_utils")
    _classes = () if module is None else (module.Cache,)


def has_cache(args: Any, kwargs: Any) -> bool:
    """Whether a cache is among the arguments."""
    return bool(_classes) and any(isinstance(value, _classes) for value in (*args, *kwargs.values()))


def without_caches(args: Any, kwargs: Any) -> Any:
    """The arguments with None for each cache."""
    if not has_cache(args, kwargs):
        return args, kwargs
    args = tuple(None if isinstance(value, _classes) else value for value in args)
    return args, {name: None if isinstance(value, _classes) else value for name, value in kwargs.items()}
