"""How often the loss of a backward was divided by each number of micro-batches, with functions of the file followed.

`loss = self.compute_loss(batch)` has the divisions of what that function returns, and the loss in `backward(loss / n)`
has, in that function, those of the line that calls it. A division counts only where it certainly runs.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Mapping

from halfstep.check.script.flow.divisions import MAX_ASSIGNMENTS, Assignment, assignments_before, divisor_of
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import function_around
from halfstep.check.script.objects.values import argument, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import statements_in
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["divisions_of_loss"]

MAX_DEPTH = 3  # of calls that are followed
MAX_NODES = 2000  # of expressions that are read for one backward
Counts = Mapping[str, int]  # by divisor
_NONE: Counts = {}


def divisions_of_loss(script: Script, event: Event, is_counted: Callable[[str], bool]) -> Counts:
    """How often the loss of a backward is certainly divided by each divisor that `is_counted` accepts."""
    reader = _Reader(script, is_counted)
    place = reader.at(event.node, event.function, reader.passed(event.function, event.roots))
    return {reader.texts[name]: number for name, number in place.of(event.node).items()}


class _Reader:
    def __init__(self, script: Script, is_counted: Callable[[str], bool]) -> None:
        self.script = script
        self.is_counted = is_counted
        self.functions: dict[ast.AST, Function] = {f.node: f for f in script.outline.functions}
        self.texts: dict[str, str] = {}  # of the divisors, as the script writes them
        self.nodes = 0

    def divided(self, counts: Counts, divisor: str) -> Counts:
        """Some divisions and one more; `n` and `self.n` of two functions are the same number."""
        if not self.is_counted(divisor):
            return counts
        name = divisor.rsplit(".", 1)[-1] if divisor.replace(".", "").isidentifier() else divisor
        self.texts[name] = divisor
        return {**counts, name: counts.get(name, 0) + 1}

    def passed(self, function: Function, calls: tuple[ast.AST, ...]) -> dict[str, Counts]:
        """The divisions of what the last of some nested calls passes for each parameter of a function."""
        call = calls[-1] if calls else None
        if not isinstance(call, ast.Call) or len(calls) > MAX_DEPTH:
            return {}
        around = function_around(self.script, call)
        caller = self.functions.get(around, self.script.outline.module)
        return self._arguments(call, function, self.at(call, caller, self.passed(caller, calls[:-1])))

    def at(self, node: ast.AST, function: Function, known: Mapping[str, Counts], depth: int = 0) -> _Place:
        statement = self.script.statement(node)
        before = assignments_before(self.script, statement) if statement is not None else ()
        return _Place(self, function, known, list(itertools.islice(before, MAX_ASSIGNMENTS)), depth)

    def _arguments(self, call: ast.Call, target: Function, place: _Place) -> dict[str, Counts]:
        params = target.params[1:] if target.method and target.params[:1] in {("self",), ("cls",)} else target.params
        values = {name: argument(call, position, name) for position, name in enumerate(params)}
        return {name: place.of(value) for name, value in values.items() if value is not None}

    def returned(self, call: ast.Call, index: int | None, place: _Place) -> Counts | None:
        """The divisions of what a function of the file returns, or of one of several values; None if it is not of the file."""
        target = self.script.outline.call_target(call, place.function) if place.depth < MAX_DEPTH else None
        if target is None or target.name == "__init__":
            return None
        values = [s for s in statements_in(target.node) if isinstance(s, ast.Return) and s.value is not None]
        values = [s for s in values if function_around(self.script, s) is target.node]
        known = self._arguments(call, target, place)
        counts = [self._element(s, index, self.at(s, target, known, place.depth + 1)) for s in values]
        return _least(counts) if counts else _NONE

    @staticmethod
    def _element(statement: ast.Return, index: int | None, place: _Place) -> Counts:
        value = statement.value
        if isinstance(value, ast.Tuple):
            value = value.elts[index or 0] if (index or 0) < len(value.elts) else None
        return place.of(value) if value is not None else _NONE


class _Place:
    """A line of a function: the assignments before it, nearest first, and the divisions of the function's parameters."""

    def __init__(
        self, reader: _Reader, function: Function, known: Mapping[str, Counts], before: list[Assignment], depth: int
    ) -> None:
        self.reader = reader
        self.function = function
        self.known = known
        self.before = before
        self.depth = depth
        self._variables: dict[tuple[str, int], Counts] = {}

    def of(self, node: ast.AST, start: int = 0) -> Counts:
        """The divisions of an expression; of a sum, for each divisor those of the term with the most."""
        self.reader.nodes += 1
        if self.reader.nodes > MAX_NODES:
            return _NONE
        if isinstance(node, (ast.Name, ast.Attribute)) and key_of(node):
            return self._of_variable(key_of(node), start)
        divisor = divisor_of(node)
        if divisor is not None:
            left = node.left if isinstance(node, ast.BinOp) else node.func.value  # type: ignore[attr-defined]
            return self.reader.divided(self.of(left, start), divisor)
        if isinstance(node, ast.Call):
            inside = self.reader.returned(node, None, self)
            if inside is not None:
                return inside
            parts: Iterable[ast.AST] = [*node.args, *(k.value for k in node.keywords)]
            if isinstance(node.func, ast.Attribute):
                parts = [node.func.value, *parts]  # `loss` of `loss.backward()`
            return _most(self.of(part, start) for part in parts)
        if isinstance(node, (ast.Compare, ast.Constant, ast.Lambda, ast.Subscript)):
            return _NONE
        if isinstance(node, ast.IfExp):
            return _least([self.of(node.body, start), self.of(node.orelse, start)])
        return _most(self.of(part, start) for part in ast.iter_child_nodes(node))

    def _of_variable(self, key: str, start: int) -> Counts:
        if (key, start) not in self._variables:
            self._variables[key, start] = _NONE
            position = next((i for i in range(start, len(self.before)) if self.before[i].binds(key)), None)
            if position is not None:
                self._variables[key, start] = self._of_assignment(self.before[position].statement, key, position + 1)
            elif key in self.known:
                self._variables[key, start] = self.known[key]
        return self._variables[key, start]

    def _of_assignment(self, statement: ast.Assign | ast.AugAssign, key: str, start: int) -> Counts:
        if isinstance(statement, ast.AugAssign):
            own = self._of_variable(key, start)
            if isinstance(statement.op, ast.Div):
                return self.reader.divided(own, text_of(statement.value))
            is_sum = isinstance(statement.op, (ast.Add, ast.Sub))
            return _most([own, self.of(statement.value, start)]) if is_sum else own
        target, value = statement.targets[0], statement.value
        if not isinstance(target, ast.Tuple):
            return self.of(value, start)
        index = next(i for i, part in enumerate(target.elts) if key_of(part) == key)
        if isinstance(value, ast.Call):
            return self.reader.returned(value, index, self) or _NONE
        is_pair = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
        return self.of(value.elts[index], start) if is_pair and isinstance(value, ast.Tuple) else _NONE


def _most(parts: Iterable[Counts]) -> Counts:
    most: dict[str, int] = {}
    for counts in parts:
        for divisor, number in counts.items():
            most[divisor] = max(most.get(divisor, 0), number)
    return most


def _least(every: list[Counts]) -> Counts:
    return {d: min(counts.get(d, 0) for counts in every) for d in every[0]}
