"""What a list or dictionary contains whose elements a call receives: `parts = [model]`, `parts += [optimizer]`, `prepare(*parts)`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.script.objects.expressions import arms_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["spread"]

_ADDS = {"append", "extend", "insert"}


def spread(outline: Outline, argument: ast.expr, function: Function) -> Iterator[ast.expr | None]:
    """The argument itself, or the elements of `*parts` that a function shows; None stands for those that it does not."""
    if not isinstance(argument, ast.Starred):
        yield argument
        return
    source = argument.value
    is_values = isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and source.func.attr == "values"
    source = source.func.value if is_values and isinstance(source, ast.Call) else source  # type: ignore[attr-defined]
    name = key_of(source)
    if not name:
        yield from _elements(source)
        return
    bound = outline.by_function(name).get(function.node, []) if name.isidentifier() else []
    if not bound:
        yield None
    for binding in bound:
        yield from _elements(binding.value)
    for node in ast.walk(function.node):
        if isinstance(node, ast.AugAssign) and key_of(node.target) == name:
            yield from _elements(node.value)
    for method in sorted(_ADDS):
        for call, inner in outline.calls.get(method, ()):
            if inner is function and isinstance(call.func, ast.Attribute) and key_of(call.func.value) == name:
                added = call.args[-1] if call.args else None
                yield from _elements(added) if method == "extend" else (added,)


def _elements(value: ast.expr | None) -> Iterator[ast.expr | None]:
    """The elements of a list, tuple or dictionary that is written in place, also of a choice and a sum of several."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        yield from (*_elements(value.left), *_elements(value.right))
        return
    for arm in arms_of(value) if value is not None else ():
        if isinstance(arm, ast.Dict):
            yield from arm.values
        elif isinstance(arm, (ast.List, ast.Tuple)):
            yield from (None if isinstance(e, ast.Starred) else e for e in arm.elts)
        else:
            yield None
    if value is None:
        yield None
