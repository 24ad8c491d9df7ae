"""Which models get no gradients in a simulated run, because the script has frozen them.

A generator's loss does not reach a discriminator that is frozen meanwhile. Where only some parameters of a model may be frozen,
nothing is known about an optimizer that has parameters of it, next to others.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Frozen", "covers", "overlap"]

_ELEMENT = "batch#"  # of something unknown that a loop runs through


def covers(keys: Iterable[str], model: str) -> bool:
    """Whether a model, or one that it is a part of, is among these."""
    return any(model == key or model.startswith(f"{key}.") for key in keys)


def overlap(first: Iterable[str], second: Iterable[str]) -> bool:
    """Whether two sets of models have one in common, or a part of one."""
    return any(a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.") for a in first for b in second)


class Frozen:
    """The models without gradients, and those of which some parameters may have none."""

    def __init__(self) -> None:
        self._certain: set[str] = set()
        self._perhaps: set[str] = set()
        self._is_anything = False  # parameters of an unknown model may be frozen

    def set(self, models: frozenset[str] | None, flag: object, *, is_all: bool) -> None:
        """The script sets `requires_grad` of all, or perhaps some, parameters of these models."""
        if models is None or any(m.startswith(_ELEMENT) for m in models):
            self._is_anything = self._is_anything or flag is not True
        elif not is_all or not isinstance(flag, bool):
            self._perhaps |= models
        elif flag:
            partly = {m for m in self._certain if not covers(models, m) and overlap({m}, models)}
            self._perhaps = {m for m in self._perhaps if not covers(models, m)} | partly
            self._certain = {m for m in self._certain if not covers(models, m)} - partly
        else:
            self._perhaps = {m for m in self._perhaps if not covers(models, m)}
            self._certain |= models

    def reached(self, models: frozenset[str] | None) -> frozenset[str] | None:
        """The models that a backward pass, which these have computed the loss of, gives gradients."""
        if models is None or not self._certain:
            return models
        return frozenset(m for m in models if not covers(self._certain, m))

    def may_leave(self, models: frozenset[str]) -> bool:
        """Whether an optimizer of these models may have parameters without gradients only."""
        return self._is_anything or overlap(self._perhaps, models) or all(covers(self._certain, m) for m in models)
