"""Which rule applies to the calling thread: that of an autocast preset, that of a lean one, or none outside a region."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["STATE", "Rule", "cast_once", "current_rule", "recomputing", "record_16_bits", "rule_in_thread"]


class Rule(enum.Enum):
    """What a region does with operations on torch's fp32 lists."""

    AUTOCAST = "autocast"  # fp32 inputs and results
    LEAN = "lean"  # 16-bit results where they are as large as the input


class _State(threading.local):
    rule: Rule | None = None
    observed: Counter[str] | None = None  # operations that gave 16 bits where torch.amp gives fp32
    casts: dict[Any, Tensor] | None = None  # rounded tables, for the time of a region


# Kernels, which run between operations of a few microseconds, read it before they ask `current_rule`.
STATE = _State()
_backwards: list[Rule] = []  # one entry for each backward pass in progress


def current_rule() -> Rule | None:
    """The rule for this thread, or that of a backward pass in progress."""
    return STATE.rule or (_backwards[-1] if _backwards else None)


def record_16_bits(name: str) -> None:
    """Count an operation of torch's fp32 list that gives 16 bits here, if a region asks for that."""
    if STATE.observed is not None:
        STATE.observed[name] += 1


def cast_once(key: Any, cast: Callable[[], Tensor]) -> Tensor:
    """The result of a cast, computed once in a region for each key."""
    if STATE.casts is None:
        return cast()
    if key not in STATE.casts:
        STATE.casts[key] = cast()
    return STATE.casts[key]


@contextlib.contextmanager
def rule_in_thread(rule: Rule, observed: Counter[str] | None) -> Iterator[None]:
    """Apply a rule to what this thread computes in this block."""
    before = (STATE.rule, STATE.observed, STATE.casts)
    STATE.rule, STATE.observed, STATE.casts = rule, observed, {}
    try:
        yield
    finally:
        STATE.rule, STATE.observed, STATE.casts = before


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
