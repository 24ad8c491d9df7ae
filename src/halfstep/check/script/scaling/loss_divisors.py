"""By which numbers the loss of a backward was divided, with assignments and functions of the file followed.

`loss_fn = partial(distill, parts=args.accumulation)` and `return loss / parts` in `distill` divide by `args.accumulation`:
a divisor is returned as the function with the backward knows it. Every term of a sum has to be divided.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from halfstep.check.script.flow.divisions import assignments_before
from halfstep.check.script.objects.choices import argument, constant, text_of
from halfstep.check.script.objects.formats import returned_by
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import statements_in
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.scope import default_of

__all__ = ["Divisor", "divisors_of", "divisors_returned"]

MAX_DEPTH = 4  # of functions that are followed
MAX_NODES = 300  # of expressions that are read for one backward
_DIVIDES = {"div", "div_", "divide", "true_divide"}
_KEEPS = {"mean", "sum", "float", "to", "squeeze", "double", "clone", "contiguous", "cuda", "reshape", "view"}


class Divisor(NamedTuple):
    """A number that a loss is divided by, and the function in which it has that name."""

    value: ast.expr
    function: Function
    is_above: bool = False  # a caller of the function with the backward divides by it


class _Frame(NamedTuple):
    """A function that is read, where in it, and what its caller passes for its parameters."""

    function: Function
    node: ast.AST
    passed: Mapping[str, tuple[ast.expr, _Frame]]
    depth: int
    skip: int = 0  # assignments before the line of `node`, nearest first, that come after the expression


def divisors_of(script: Script, call: ast.Call, function: Function) -> list[Divisor]:
    """What the loss of `engine.backward(loss)` was certainly divided by."""
    if not call.args:
        return []
    return _Reader(script).of(call.args[0], _Frame(function, call, {}, 0))


def divisors_returned(script: Script, function: Function, name: str) -> Iterator[tuple[ast.expr, Divisor]]:
    """What a loss that a function returns was divided by, each with the returned expression, also as the entry of a dictionary."""
    for value in returned_by(function):
        frame = _Frame(function, value, {}, 0)
        reader = _Reader(script)
        for divisor in reader.of_entry(value, name, frame) or reader.of(value, frame):
            yield value, divisor


class _Reader:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.num_nodes = 0

    def of(self, node: ast.expr | None, frame: _Frame) -> list[Divisor]:
        """The divisors of an expression."""
        self.num_nodes += 1
        if node is None or self.num_nodes > MAX_NODES:
            return []
        if isinstance(node, ast.BinOp):
            return self._of_operation(node, frame)
        if isinstance(node, ast.Call):
            return self._of_call(node, frame)
        if isinstance(node, ast.UnaryOp):
            return self.of(node.operand, frame)
        if isinstance(node, ast.IfExp):
            return self._of_choice(node, frame)
        if isinstance(node, ast.Subscript) and isinstance(name := constant(node.slice), str):
            return self.of_entry(node.value, name, frame)
        return self._of_variable(key_of(node), frame)

    def _of_operation(self, node: ast.BinOp, frame: _Frame) -> list[Divisor]:
        if isinstance(node.op, ast.Div):
            return [self._named(node.right, frame), *self.of(node.left, frame)]
        left, right = self.of(node.left, frame), self.of(node.right, frame)
        if isinstance(node.op, ast.Mult):
            return [*left, *right]
        is_sum = isinstance(node.op, (ast.Add, ast.Sub))
        empty = {0}
        if is_sum and (constant(node.left) in empty or constant(node.right) in empty):
            return [*left, *right]
        return _shared(left, right) if is_sum else []

    def _of_choice(self, node: ast.IfExp, frame: _Frame) -> list[Divisor]:
        """The divisors of both arms; those of the first in `loss / n if n > 1 else loss`, where a division by 1 is left out."""
        body, other = self.of(node.body, frame), self.of(node.orelse, frame)
        tested = text_of(node.test.left) if isinstance(node.test, ast.Compare) else ""
        is_guard = isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], (ast.Gt, ast.GtE, ast.NotEq))
        own = [text_of(n.right) for n in ast.walk(node.body) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
        return body if is_guard and tested in own else _shared(body, other)

    def _of_call(self, call: ast.Call, frame: _Frame) -> list[Divisor]:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        if name in _DIVIDES and call.args:
            left, right = (receiver, call.args[0]) if len(call.args) == 1 else call.args[:2]
            return [self._named(right, frame), *self.of(left, frame)]
        if (inner := self._entered(call, frame)) is not None:
            return self._of_returned(inner, None)
        if (inner := self._of_lambda(call, frame)) is not None and isinstance(inner.node, ast.Lambda):
            return self.of(inner.node.body, inner)
        return self.of(receiver, frame) if name in _KEEPS else []

    def _entered(self, call: ast.Call, frame: _Frame) -> _Frame | None:
        """The function of the file that a call runs, also through `functools.partial`, with what it is passed."""
        outline = self.script.outline
        calls, target = [call], outline.call_target(call, frame.function)
        values = outline.sources(key_of(call.func), frame.function) if target is None and key_of(call.func) else []
        if len(values) == 1 and isinstance(made := values[0][0], ast.Call):
            if outline.names.full(made.func) == "functools.partial" and made.args:
                calls.append(ast.Call(made.args[0], made.args[1:], made.keywords))
                target = outline.call_target(calls[1], values[0][1])
        elif len(values) == 1:  # `compute = kd_loss`
            target = outline.call_target(ast.Call(values[0][0], [], []), values[0][1])
        if target is None or target.name == "__init__" or frame.depth >= MAX_DEPTH:
            return None
        params = target.params[1:] if target.method and target.params[:1] in {("self",), ("cls",)} else target.params
        positions = [*(calls[1].args if len(calls) > 1 else ()), *call.args]
        passed: dict[str, tuple[ast.expr, _Frame]] = {}
        for position, name in enumerate(params):
            value = next((v for c in calls if (v := argument(c, None, name)) is not None), None)
            is_plain = position < len(positions) and not any(isinstance(p, ast.Starred) for p in positions)
            value = positions[position] if value is None and is_plain else value
            if value is not None:
                passed[name] = (value, frame)
            elif (default := default_of(target, name)) is not None and not any(k.arg is None for k in call.keywords):
                passed[name] = (default, frame)
        return _Frame(target, target.node, passed, frame.depth + 1)

    def _of_lambda(self, call: ast.Call, frame: _Frame) -> _Frame | None:
        """The lambda that a call of a variable runs, with what it is passed."""
        sources = self.script.outline.sources(key_of(call.func), frame.function) if key_of(call.func) else []
        made, around = sources[0] if len(sources) == 1 else (None, frame.function)
        if not isinstance(made, ast.Lambda) or frame.depth >= MAX_DEPTH:
            return None
        names = [a.arg for a in made.args.args]
        passed = {name: (value, frame) for name, value in zip(names, call.args, strict=False)}
        return _Frame(around, made, passed, frame.depth + 1)

    def _of_returned(self, frame: _Frame, part: int | str | None) -> list[Divisor]:
        """The divisors of what a function returns, or of one of several values, on every way out of it."""
        every: list[list[Divisor]] = []
        for value in returned_by(frame.function):
            own = frame._replace(node=value)
            if isinstance(value, ast.Tuple):
                index = part if isinstance(part, int) else 0
                every.append(self.of(value.elts[index] if index < len(value.elts) else None, own))
            elif isinstance(part, str):
                every.append(self.of_entry(value, part, own))
            else:
                every.append(self.of(value, own) if part is None else [])
        return _in_all(every)

    def of_entry(self, table: ast.expr, name: str, frame: _Frame) -> list[Divisor]:
        """The divisors of `outputs["loss"]`, in a dictionary that is written out or that a function of the file returns."""
        if isinstance(table, ast.Dict):
            entries = [v for k, v in zip(table.keys, table.values, strict=True) if constant(k) == name]
            return self.of(entries[0], frame) if len(entries) == 1 else []
        if isinstance(table, ast.Call):
            inner = self._entered(table, frame)
            return self._of_returned(inner, name) if inner is not None else []
        key = key_of(table)
        above, statement = self._bound(key, frame) if key else (frame, None)
        if isinstance(statement, ast.Assign) and key_of(statement.targets[0]) == key:
            return self.of_entry(statement.value, name, above)
        return []

    def _of_variable(self, key: str, frame: _Frame) -> list[Divisor]:
        above, statement = self._bound(key, frame) if key else (frame, None)
        if statement is None:
            return self.of(*frame.passed[key]) if key in frame.passed else self._of_callers(key, frame)
        if isinstance(statement, ast.AugAssign):
            before = self._of_variable(key, above)
            if isinstance(statement.op, ast.Div):
                return [self._named(statement.value, frame), *before]
            added = self.of(statement.value, above)
            return [*before, *added] if isinstance(statement.op, ast.Mult) else _shared(before, added)
        target, value = statement.targets[0], statement.value
        if not isinstance(target, (ast.Tuple, ast.List)):
            return self.of(value, above)
        index = next((i for i, part in enumerate(target.elts) if key_of(part) == key), 0)
        if isinstance(value, ast.Call):
            inner = self._entered(value, above)
            return self._of_returned(inner, index) if inner is not None else []
        is_pair = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
        return self.of(value.elts[index], above) if is_pair and isinstance(value, ast.Tuple) else []

    def _of_callers(self, key: str, frame: _Frame) -> list[Divisor]:
        """The divisors of what every call of the file passes for a parameter of the function with the backward."""
        if key not in frame.function.params or frame.passed or frame.depth <= -MAX_DEPTH:
            return []
        passed = list(self.script.outline.passed(key, frame.function))
        every = [self.of(value, _Frame(caller, value, {}, frame.depth - 1)) for value, caller in passed]
        return _in_all(every)

    def _bound(self, key: str, frame: _Frame) -> tuple[_Frame, ast.Assign | ast.AugAssign | None]:
        """The assignment that a variable has at a line, and the place just above that assignment.

        It is the one in the same iteration, else the last above the line that is not in another branch of an `if`.
        """
        statement = self.script.statement(frame.node)
        before = list(assignments_before(self.script, statement)) if statement is not None else []
        position = next((i for i in range(frame.skip, len(before)) if before[i].binds(key)), None)
        if position is not None:
            return frame._replace(skip=position + 1), before[position].statement
        line = before[frame.skip - 1].statement.lineno - 1 if frame.skip else getattr(frame.node, "lineno", 0)
        above = [s for s in _assignments_in(frame.function).get(key, ()) if s.lineno <= line]
        last = max(above, key=lambda s: s.lineno, default=None)
        if last is None or last is frame.node or _excluded(self.script, last, frame.node):
            return frame, None
        return frame._replace(node=last, skip=0), last

    def _named(self, value: ast.expr, frame: _Frame) -> Divisor:
        """A divisor as the outermost function that passes it on knows it: `args.steps` for a parameter `parts`."""
        value = _plain(value)
        own = self.script.outline.by_function
        while (key := key_of(value)) in frame.passed and not own(key).get(frame.function.node):
            value, frame = frame.passed[key]
            value = _plain(value)
        return Divisor(value, frame.function, frame.depth < 0)


def _plain(value: ast.expr) -> ast.expr:
    """A number without its conversion or lower bound: `n` of `float(n)` and `max(n, 1)`."""
    if isinstance(value, ast.Call) and text_of(value.func) in {"float", "int", "max"}:
        parts = [part for part in value.args if constant(part) is ...]
        return _plain(parts[0]) if len(parts) == 1 and key_of(parts[0]) else value
    return value


def _in_all(every: list[list[Divisor]]) -> list[Divisor]:
    """The divisors that all values have."""
    shared = every[0] if every else []
    for others in every[1:]:
        shared = _shared(shared, others)
    return shared


def _shared(left: list[Divisor], right: list[Divisor]) -> list[Divisor]:
    """The divisors of both terms of a sum."""
    texts = {text_of(d.value) for d in right}
    return [d for d in left if text_of(d.value) in texts]


@lru_cache(maxsize=8)  # one walk per function, however often it calls backward
def _assignments_in(function: Function) -> dict[str, list[ast.Assign | ast.AugAssign]]:
    """The assignments of a function by the variables they bind."""
    by_key: dict[str, list[ast.Assign | ast.AugAssign]] = {}
    for node in statements_in(function.node):
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                by_key.setdefault(key_of(target), []).append(node)
    return by_key


def _excluded(script: Script, first: ast.AST, second: ast.AST) -> bool:
    """Whether two nodes are in the two branches of one `if`."""
    branches = dict(_branches(script, first))
    return any(branches.get(test, is_body) != is_body for test, is_body in _branches(script, second))


def _branches(script: Script, node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Each `if` around a node, and whether the node is in its first branch."""
    child = node
    for parent in script.above(node):
        if isinstance(parent, ast.If):
            yield parent, child in parent.body
        child = parent
