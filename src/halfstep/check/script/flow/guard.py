"""Guards, and which of them are possible together.

A guard is a condition around an event and its truth value. Two guards contradict each other if no value of the tested
variable satisfies both: `amp` and `not amp`, `clip > 0` and `clip == 0`, `mode == "a"` and `mode in ("b", "c")`. Conditions on
different variables never do: a mistake on one possible path is a mistake.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from halfstep.check.regex import regex

__all__ = ["Guard", "possible", "tested_values"]


# A named tuple rather than a dataclass: guards are hashed and compared for every pair of events.
class Guard(NamedTuple):
    """The text of a condition, and whether it is true."""

    text: str
    is_true: bool

    @property
    def opposite(self) -> Guard:
        """The same condition with the other truth value."""
        return Guard(self.text, not self.is_true)


_COMPARISON = regex(r"^(.+?) (==|<=|>=|<|>|in) (-?\d[\d.e-]*|'[^']*'|\"[^\"]*\"|[\[({].*[\])}])$")
_JOINED = regex(r" (and|or|if|not) ")


@dataclass(frozen=True)
class _Test:
    """The values of one variable that satisfy a guard: a set, all but a set, or an interval."""

    subject: str
    values: frozenset[object] | None = None
    excluded: frozenset[object] = frozenset()
    low: float = -math.inf
    high: float = math.inf
    is_low_open: bool = False
    is_high_open: bool = False

    def accepts(self, value: object) -> bool:
        """Whether the variable may have this value."""
        if self.values is not None and value not in self.values:
            return False
        if value in self.excluded:
            return False
        if isinstance(value, (int, float)):
            above = value > self.low or (value == self.low and not self.is_low_open)
            return above and (value < self.high or (value == self.high and not self.is_high_open))
        return self.low == -math.inf and self.high == math.inf


@lru_cache(maxsize=16384)
def possible(a: tuple[Guard, ...], b: tuple[Guard, ...]) -> bool:
    """Whether no guard of `a` contradicts one of `b`."""
    opposite = {(text, not is_true) for text, is_true in a}
    if any(guard in opposite for guard in b):
        return False
    if _refutes(a, b) or _refutes(b, a):
        return False
    tests: dict[str, list[_Test]] = {}
    for guard in a:
        if (test := _read(guard)) is not None:
            tests.setdefault(test.subject, []).append(test)
    others = (_read(guard) for guard in b) if tests else ()
    return not any(_excludes(test, other) for test in others if test for other in tests.get(test.subject, ()))


def _excludes(a: _Test, b: _Test) -> bool:
    """Whether no value satisfies both tests of one variable."""
    for one, other in ((a, b), (b, a)):
        if one.values is not None:
            return not any(other.accepts(value) for value in one.values)
    low, high = max(a.low, b.low), min(a.high, b.high)
    is_open = any(t.is_low_open for t in (a, b) if t.low == low) or any(
        t.is_high_open for t in (a, b) if t.high == high
    )
    return low > high or (low == high and is_open)


def _refutes(parts: tuple[Guard, ...], whole: tuple[Guard, ...]) -> bool:
    """Whether `a` and `b` are true although `a and b` is not, or false although `a or b` is true."""
    for text, is_true in whole:
        word = " or " if is_true else " and "
        plain = word in text and (" and " in text) != (" or " in text)
        if plain and all(_refuted(part, is_true=is_true) in parts for part in text.split(word)):
            return True
    return False


def _refuted(part: str, *, is_true: bool) -> Guard:
    """The guard that contradicts one part of a joined condition: `a`, or `not a`."""
    return Guard(part.removeprefix("not "), is_true if part.startswith("not ") else not is_true)


@lru_cache(maxsize=4096)
def _read(guard: Guard) -> _Test | None:
    """The values that a guard allows; None where it is not a comparison with a literal, nor a plain variable."""
    text, is_true = guard
    if text.replace(".", "").isidentifier():
        # A false flag may be 0 or None; a true one is neither.
        return _Test(text, excluded=frozenset({0})) if is_true else _Test(text, frozenset({0, "", None}))
    match = _COMPARISON.match(text)
    if match is None or _JOINED.search(match[1]):
        return None
    subject, op, literal = match.groups()
    try:
        value = ast.literal_eval(literal)
        if op == "in" and isinstance(value, str):
            return None  # a part of a text
        if op in {"==", "in"}:
            values = frozenset(value if op == "in" else (value,))
            return _Test(subject, values) if is_true else _Test(subject, excluded=values)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    if not isinstance(value, (int, float)):
        return None
    if not is_true:
        op = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}[op]
    is_open = len(op) == 1
    if op[0] == "<":
        return _Test(subject, high=value, is_high_open=is_open)
    return _Test(subject, low=value, is_low_open=is_open)


def tested_values(parts: list[str]) -> list[str]:
    """The parts of a condition without those that only guard another: `args is not None` before `args.amp`."""
    owners = {part.rpartition(".")[0] for part in parts if part.replace(".", "").isidentifier()} - {""}
    return [part for part in parts if part.removesuffix(" is not None") not in owners]
