"""A model's own names for its tensors, whatever wraps it or its parts.

DDP, DataParallel, torch.compile, FSDP1 and activation checkpointing insert a level into the names of the tensors below them.
Checkpoints are written without these levels. Whether a level is one of them depends on the type of the module that has
it: a user's own submodule may be called `module` too, and its level is part of the name.

A checkpoint of a wrapper of another kind, or of one that was written from names alone, still fits: names that have no
equal on the other side are compared once more with every level removed that looks like a wrapper's (`match_names`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

__all__ = ["clean_name", "clean_names", "match_names"]

# The attribute under which each of torch's wrappers stores the module inside it.
_LEVELS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
}
_LOOKS_LIKE_A_WRAPPER = frozenset(_LEVELS.values())


def clean_name(name: str) -> str:
    """A name without the levels that look like those of a wrapper; for names whose model is not at hand."""
    *levels, last = name.split(".")
    return ".".join([*(level for level in levels if level not in _LOOKS_LIKE_A_WRAPPER), last])


def clean_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names in `module`, each with the name it has without wrappers; no two of these are equal."""
    own = {name: _without_wrappers(module, name) for name in names}
    for _ in range(2):  # a wrapper with tensors of its own: those whose names would be equal stay as they are
        counts = Counter(own.values())
        own = {name: clean if counts[clean] == 1 else name for name, clean in own.items()}
    return own if len(set(own.values())) == len(own) else {name: name for name in own}


def match_names(saved: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """Saved names, each with this model's name for the same tensor; those that fit nothing are left out."""
    saved, own = dict.fromkeys(saved), dict.fromkeys(own)
    matches = {name: name for name in saved if name in own}
    theirs, ours = (_by_clean_name(name for name in names if name not in matches) for names in (saved, own))
    matches |= {
        names[0]: ours[clean][0] for clean, names in theirs.items() if len(names) == len(ours.get(clean, [])) == 1
    }
    return matches


def _by_clean_name(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(clean_name(name), []).append(name)
    return groups


def _without_wrappers(module: nn.Module, name: str) -> str:
    levels, own = name.split("."), list[str]()
    while levels:
        wrapped = _wrapped_level(module)
        if wrapped is not None:
            inner = module._modules[wrapped]  # noqa: SLF001 - getattr of torch's wrappers looks into the inner module
            if levels[0] == wrapped:
                levels = levels[1:]
            elif levels[0] in _members(module):
                break
            assert inner is not None
            module = inner  # some wrappers remove their level from state_dict() themselves
            continue
        child = module._modules.get(levels[0])  # noqa: SLF001
        if child is None:
            break
        own.append(levels.pop(0))
        module = child
    return ".".join([*own, *levels])


def _wrapped_level(module: nn.Module) -> str | None:
    """The level that a wrapper of torch's inserts; None for any other module."""
    for kind in type(module).__mro__:
        level = _LEVELS.get(kind.__name__)
        if level is not None and kind.__module__.startswith("torch.") and module._modules.get(level) is not None:  # noqa: SLF001
            return level
    return None


def _members(module: nn.Module) -> set[str]:
    """The tensors and modules that a module has itself."""
    return {*module._parameters, *module._buffers, *module._modules}  # noqa: SLF001
