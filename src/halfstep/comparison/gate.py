"""Gates for continuous integration: `--fail-if "bf16.loss_gap > 0.02"`.

A gate is a comparison of figures, `ROW.METRIC` and numbers, joined by + - * / and parentheses, and by `and` and `or`:

    bf16.loss_gap > 0.02
    bf16-lean.samples_per_second < 1.1 * torch-amp.samples_per_second
    fp16.skips > 5 or fp16.metric < 0.95

It is read by the small parser below and nothing else; no Python is evaluated. Rows are named by their labels, commas and
all: at a place where a figure may stand, the longest known label that fits is taken. A figure that was not measured,
because its row failed or was not run, fails the gate: a check that could not be made has not passed.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from halfstep.comparison.rows import METRICS
from halfstep.errors import SettingError, unknown

__all__ = ["Gate", "GateResult", "check_gate", "parse_gate"]

Figures = Mapping[str, Mapping[str, float | None]]  # row label -> metric -> value
Node = Callable[[Figures], float | bool]
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_NUMBER = re.compile(r"\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?")
_NAME = re.compile(r"[A-Za-z_][^\s()<>*/+]*")  # anything like a row's label, for the message about an unknown one
_METRIC = re.compile(r"\w+")
_DEEPEST = 20


@dataclass(frozen=True)
class Gate:
    """A parsed gate."""

    text: str
    holds: Node
    figures: tuple[tuple[str, str], ...]  # the (row, metric) pairs it looks at


@dataclass(frozen=True)
class GateResult:
    """A gate's answer, with the values it saw."""

    text: str
    failed: bool
    seen: str

    def __str__(self) -> str:
        return f"{'FAILED' if self.failed else 'passed'}: fail if {self.text}  ({self.seen})"


def parse_gate(text: str, labels: Sequence[str]) -> Gate:
    """Read a gate over rows with these labels; what is wrong with it is said with what is known."""
    parser = _Parser(text, labels)
    node = parser.either(0)
    parser.skip()
    if parser.place < len(text):
        raise parser.error("ends here, and more follows")
    if not parser.compares:
        raise SettingError(f"The gate {text!r} compares nothing; write e.g. {labels[0]}.loss_gap > 0.02.")
    return Gate(text, node, tuple(dict.fromkeys(parser.figures)))


def check_gate(gate: Gate, figures: Figures) -> GateResult:
    """Ask a gate."""
    values = [(row, name, figures.get(row, {}).get(name)) for row, name in gate.figures]
    seen = ", ".join(f"{row}.{name} = {'not measured' if v is None else f'{v:.6g}'}" for row, name, v in values)
    if any(value is None or math.isnan(value) for _, _, value in values):  # wherever it stands: `and` does not hide it
        return GateResult(gate.text, failed=True, seen=f"{seen}: a check that could not be made has not passed")
    try:
        failed = bool(gate.holds(figures))
    except ZeroDivisionError:
        return GateResult(gate.text, failed=True, seen=f"{seen}: it divides by zero")
    return GateResult(gate.text, failed, seen)


class _Parser:
    """Recursive descent over: either > both > comparison > sum > product > atom."""

    def __init__(self, text: str, labels: Sequence[str]) -> None:
        self.text, self.place = text, 0
        self.known = list(labels)
        self.labels = sorted(labels, key=len, reverse=True)
        self.figures: list[tuple[str, str]] = []
        self.compares = False

    def error(self, problem: str) -> SettingError:
        return SettingError(
            f"The gate {self.text!r} {problem} (at {self.text[self.place :][:20]!r}); "
            f"write e.g. {self.known[-1]}.loss_gap > 0.02. Joined by and, or."
        )

    def skip(self) -> None:
        while self.place < len(self.text) and self.text[self.place].isspace():
            self.place += 1

    def take(self, token: str) -> bool:
        self.skip()
        found = self.text.startswith(token, self.place)
        if found and token.isalpha():  # a word: "or" must not be the start of another
            after = self.text[self.place + len(token) : self.place + len(token) + 1]
            found = not (after.isalnum() or after in {"_", ".", "-"})
        self.place += len(token) if found else 0
        return found

    def either(self, depth: int) -> Node:
        parts = [self.both(depth)]
        while self.take("or"):
            parts.append(self.both(depth))
        return parts[0] if len(parts) == 1 else lambda f: any(part(f) for part in parts)

    def both(self, depth: int) -> Node:
        parts = [self.comparison(depth)]
        while self.take("and"):
            parts.append(self.comparison(depth))
        return parts[0] if len(parts) == 1 else lambda f: all(part(f) for part in parts)

    def comparison(self, depth: int) -> Node:
        left = self.sum(depth)
        for sign, compare in _COMPARE.items():
            if self.take(sign):
                right = self.sum(depth)
                self.compares = True
                return lambda f: compare(left(f), right(f))
        return left

    def sum(self, depth: int) -> Node:
        return self._chain(depth, self.product, {"+": operator.add, "-": operator.sub})

    def product(self, depth: int) -> Node:
        return self._chain(depth, self.atom, {"*": operator.mul, "/": operator.truediv})

    def _chain(
        self, depth: int, part: Callable[[int], Node], signs: dict[str, Callable[[float, float], float]]
    ) -> Node:
        node = part(depth)
        while True:
            sign = next((s for s in signs if self.take(s)), None)
            if sign is None:
                return node
            node = _apply(signs[sign], node, part(depth))

    def atom(self, depth: int) -> Node:
        if depth > _DEEPEST:
            raise self.error(f"is nested deeper than {_DEEPEST} levels")
        if self.take("("):
            inner = self.either(depth + 1)
            if not self.take(")"):
                raise self.error("has an open parenthesis")
            return inner
        if self.take("-"):
            inner = self.atom(depth + 1)
            return lambda f: -inner(f)
        number = _NUMBER.match(self.text, self.place)
        if number:
            self.place = number.end()
            value = float(number[0])
            return lambda _: value
        return self.figure()

    def figure(self) -> Node:
        label = next((x for x in self.labels if self.text.startswith(f"{x}.", self.place)), None)
        name = _NAME.match(self.text, self.place)
        if label is not None:
            name = _METRIC.match(self.text, self.place + len(label) + 1)
        if label is None or name is None:
            if name is None:
                raise self.error("lacks a figure or a number")
            row, dot, _ = name[0].rpartition(".")
            if not dot:
                raise self.error(f"has {name[0]!r} where ROW.METRIC is expected")
            raise unknown("row", row, self.known, "A gate names ROW.METRIC.")
        if name[0] not in METRICS:
            raise unknown("metric", name[0], METRICS)
        self.place = name.end()
        pair = (label, name[0])
        self.figures.append(pair)

        def read(figures: Figures) -> float:
            value = figures[pair[0]][pair[1]]
            assert value is not None  # check_gate looked
            return value

        return read


def _apply(function: Callable[[float, float], float], left: Node, right: Node) -> Node:
    return lambda f: function(left(f), right(f))
