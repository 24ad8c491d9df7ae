"""Which rule applies to the calling thread: that of an autocast preset, that of a lean one, or none outside a region."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["Rule", "cast_once", "current_rule", "is_observed", "recomputing", "record_16_bits", "rule_in_thread"]


class Rule(enum.Enum):
    """What a region does with operations on torch's fp32 lists."""

    AUTOCAST = "autocast"  # fp32 inputs and results
    LEAN = "lean"  # 16-bit results where they are as large as the input


class _State(threading.local):
    rule: Rule | None = None
    observed: Counter[str] | None = None  # operations that gave 16 bits where torch.amp gives fp32
    casts: dict[Any, Tensor] | None = None  # rounded tables, for the time of a region


_state = _State()
_backwards: list[Rule] = []  # one entry for each backward pass in progress


def current_rule() -> Rule | None:
    """The rule for this thread, or that of a backward pass in progress."""
    return _state.rule or (_backwards[-1] if _backwards else None)


def is_observed() -> bool:
    """Whether a region asks for a count of 16-bit results."""
    return _state.observed is not None


def record_16_bits(name: str) -> None:
    """Count an operation of torch's fp32 list that gives 16 bits here, if a region asks for that."""
    if _state.observed is not None:
        _state.observed[name] += 1


def cast_once(key: Any, cast: Callable[[], Tensor]) -> Tensor:
    """The result of a cast, computed once in a region for each key."""
    if _state.casts is None:
        return cast()
    if key not in _state.casts:
        _state.casts[key] = cast()
    return _state.casts[key]


@contextlib.contextmanager
def rule_in_thread(rule: Rule, observed: Counter[str] | None) -> Iterator[None]:
    """Apply a rule to what this thread computes in this block."""
    before = (_state.rule, _state.observed, _state.casts)
    _state.rule, _state.observed, _state.casts = rule, observed, {}
    try:
        yield
    finally:
        _state.rule, _state.observed, _state.casts = before


@contextlib.contextmanager
def recomputing(*, lean: bool = False) -> Iterator[None]:
    """For a backward pass: activation checkpointing runs forwards in it, which must follow the rule they followed.

    On a GPU autograd runs them in its own thread, so the switch covers all threads during the pass.
    """
    _backwards.append(Rule.LEAN if lean else Rule.AUTOCAST)
    try:
        yield
    finally:
        _backwards.pop()
