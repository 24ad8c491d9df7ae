"""Checks for inf and NaN in a trace, where tensors have no data: the results are those of a step without overflow.

Losses, and models that clamp what overflows in fp16, contain `if not torch.isfinite(x).all()`. The branch is known
without data: a plan is for a step that works. So the comparisons behind isfinite, isnan and isinf have one known result
for all elements, and so does everything derived from them by and, or, not, all and any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CHECKS", "answer"]

_aten = torch.ops.aten
_NEVER = (_aten.isnan, _aten.isinf, _aten.isposinf, _aten.isneginf)
_SAME = (_aten.all, _aten.any, _aten.view, _aten.reshape, _aten.clone, _aten.unsqueeze, _aten.squeeze)
_NOT = (_aten.logical_not, _aten.bitwise_not)
_AND = (_aten.mul, _aten.logical_and, _aten.bitwise_and)
_OR = (_aten.logical_or, _aten.bitwise_or)
# The operations that can be part of a check.
CHECKS = frozenset((*_NEVER, *_SAME, *_NOT, *_AND, *_OR, _aten.eq, _aten.ne))


def answer(func: Any, args: Any, known: Callable[[Any], bool | None]) -> bool | None:
    """The value of every element of a check's result; None if it is not a check. `known` gives it for inputs."""
    kind = func.overloadpacket
    if kind in _NEVER:
        return False
    if kind in (_aten.eq, _aten.ne):
        left, right = args[:2]
        if left is right:  # only NaN differs from itself
            return kind is _aten.eq
        if isinstance(right, float) and math.isinf(right):
            return kind is _aten.ne
        return None
    first = known(args[0])
    if first is None or kind in _SAME:
        return first
    if kind in _NOT:
        return not first
    second = known(args[1])
    if second is None:
        return None
    return first and second if kind in _AND else first or second
