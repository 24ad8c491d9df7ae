"""The variable in which a `for` loop counts its passes, and values that are such a count.

    for i, batch in tqdm(enumerate(loader)):               i
    bar = tqdm(bar)                                        i of `for i, batch in bar:`, where `bar` was `enumerate(loader)` before
    for step, batch in zip(range(first, last), loader):    step

The bar may also be a choice, or an attribute that another method assigns.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import function_around, loops_around
from halfstep.check.script.objects.expressions import arms_of
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function

__all__ = ["counter_of", "is_position"]

_COUNTS = {"range", "trange", "count"}
_BARS = {"tqdm", "track", "progress_bar", "iter", "auto_tqdm"}
_NUMBER = regex(r"(^|_)(i|it|iter|iteration|idx|index|step)$")
MAX_DEPTH = 3  # variables and parameters between a count and a value


def counter_of(script: Script, loop: ast.AST | None, function: Function) -> str:
    """The variable in which a `for` loop of a function counts its passes; "" for any other loop."""
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return ""
    target = loop.target
    calls = list(_iterated(script, loop.iter, function, set()))
    names = {last_name(text_of(call.func)) if isinstance(call, ast.Call) else "" for call in calls}
    if names and names <= _COUNTS:
        return target.id if isinstance(target, ast.Name) else ""
    if not isinstance(target, (ast.Tuple, ast.List)) or not target.elts:
        return ""
    first = key_of(target.elts[0])
    is_unknown = all(map(key_of, calls))  # a bar that a function assigns which was not read, or another file
    if names == {"enumerate"} or (is_unknown and _NUMBER.search(first)):
        return first
    if names == {"zip"} and len(calls) == 1 and isinstance(calls[0], ast.Call):
        for part, element in zip(calls[0].args, target.elts, strict=False):
            if isinstance(part, ast.Call) and last_name(text_of(part.func)) in _COUNTS:
                return key_of(element)
    return ""


def _iterated(script: Script, source: ast.expr, function: Function, followed: set[str]) -> Iterator[ast.expr]:
    """What a loop may run over, without the bars around it, also in a variable that is assigned its own bar."""
    for arm in arms_of(source):
        inner: ast.expr = arm.value if isinstance(arm, ast.NamedExpr) else arm
        while isinstance(inner, ast.Call) and last_name(text_of(inner.func)) in _BARS and inner.args:
            inner = inner.args[0]
        key = key_of(inner)
        if key in followed:
            continue
        sources = script.outline.sources(key, function)[:MAX_BINDINGS] if key else []
        if not sources:
            yield inner
        for value, origin in sources:
            yield from _iterated(script, value, origin, followed | {key})


def is_position(script: Script, event: Event, value: ast.expr) -> bool:
    """Whether a value is the number of an iteration, `i` or `epoch * len(loader) + i`; `epoch + i / len(loader)` is one of epochs."""
    loop = next(reversed(loops_around(script, event)), None)
    around = function_around(script, loop) if loop is not None else None
    function = next((f for f in (*script.outline.functions, script.outline.module) if f.node is around), None)
    index = counter_of(script, loop, function) if function is not None else ""
    if not index or function is None or "epoch" in index:
        return False
    return _counts(script, value, event.function, (index, function))


def _counts(
    script: Script, value: ast.expr, function: Function, counted: tuple[str, Function], depth: int = MAX_DEPTH
) -> bool:
    """Whether a whole number is a count, or a sum that contains it, also through variables and parameters."""
    operators = [n.op for n in ast.walk(value) if isinstance(n, ast.BinOp)]
    if not all(isinstance(op, (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)) for op in operators):
        return False
    for part in _summands(value):
        key = key_of(part)
        if key and (key, function) == counted:
            return True
        sources = _sources(script, key, function) if key.isidentifier() and depth else []
        if sources and all(_counts(script, source, origin, counted, depth - 1) for source, origin in sources):
            return True
    return False


def _sources(script: Script, key: str, function: Function) -> list[tuple[ast.expr, Function]]:
    """What a variable of a function is assigned, or a parameter is passed."""
    if key in function.params and function.node not in script.outline.by_function(key):
        return list(script.outline.passed(key, function))[:MAX_BINDINGS]
    return script.outline.sources(key, function)[:MAX_BINDINGS]


def _summands(value: ast.expr) -> Iterator[ast.expr]:
    """The parts of a sum."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub)):
        yield from _summands(value.left)
        yield from _summands(value.right)
    else:
        yield value
