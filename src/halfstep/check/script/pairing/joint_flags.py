"""Flags that the same lines set: `if cuda: amp, scaled = True, True`, `else: amp, scaled = False, False`, so that they agree."""

from __future__ import annotations

import ast
import contextlib

from halfstep.check.script.flow.event import Guard
from halfstep.check.script.syntax.evaluate import OPEN, value_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Binding, Outline

__all__ = ["exclude_each_other"]


def exclude_each_other(outline: Outline, first: Guard, second: Guard) -> bool:
    """Whether two conditions test variables that the same blocks set to constants, none of them to those of both conditions."""
    tests: list[ast.expr] = []
    for text, _ in (first, second):
        with contextlib.suppress(SyntaxError):  # `except@12`
            tests.append(ast.parse(text, mode="eval").body)
    keys = {key for test in tests for node in ast.walk(test) if (key := key_of(node))}
    if len(tests) < 2 or not 2 <= len(keys) <= 4 or any(key.partition(".")[0] in _params(outline) for key in keys):
        return False
    blocks = [_by_block(outline, key) for key in sorted(keys)]
    if not all(blocks) or any(b.keys() != blocks[0].keys() for b in blocks):
        return False
    return not any(
        all(
            _may_be(test, dict(zip(sorted(keys), (b[place] for b in blocks), strict=True)), is_true=is_true)
            for test, (_, is_true) in zip(tests, (first, second), strict=True)
        )
        for place in blocks[0]
    )


def _params(outline: Outline) -> set[str]:
    """The names that callers set."""
    return {param for function in outline.functions for param in function.params} - {"self"}


def _by_block(outline: Outline, key: str) -> dict[tuple[int, str], object]:
    """The last constant that each block gives a variable; empty if something else may set it."""
    bindings = outline.bindings.get(key, [])
    values: dict[tuple[int, str], object] = {}
    for binding in bindings[:MAX_BINDINGS]:
        value = _constant(binding)
        place = _block(outline, binding.node)
        if value is OPEN or place is None or binding.function is not bindings[0].function:
            return {}
        values[place] = value
    return values if len(bindings) <= MAX_BINDINGS else {}


def _constant(binding: Binding) -> object:
    """The constant that an assignment gives its variable, also one of `a, b = True, False`."""
    value, index = binding.value, binding.index
    if index is not None and isinstance(value, ast.Tuple) and index < len(value.elts):
        value, index = value.elts[index], None
    return value.value if isinstance(value, ast.Constant) and index is None else OPEN


def _block(outline: Outline, node: ast.AST) -> tuple[int, str] | None:
    """The list of statements that contains the statement of an assignment."""
    while not isinstance(node, ast.stmt) and node in outline.parents:
        node = outline.parents[node]
    parent = outline.parents.get(node)
    for name, part in ast.iter_fields(parent) if parent is not None else ():
        if isinstance(part, list) and any(node is statement for statement in part):
            return id(parent), name
    return None


def _may_be(test: ast.expr, values: dict[str, object], *, is_true: bool) -> bool:
    outcome = value_of(test, lambda leaf: values.get(key_of(leaf), OPEN))
    return outcome is OPEN or bool(outcome) is is_true
