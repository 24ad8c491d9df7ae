"""Tests of a GPU's compute capability: which of them only a GPU with bfloat16 units passes."""

from __future__ import annotations

import ast

from halfstep.check.regex import regex
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["behind_ampere_test"]

_CAPABILITY = regex(r"capability|^\(?(major|cc|sm|compute_cap)\b")
_AMPERE = 8  # the first major number whose GPUs compute in bfloat16; 7.x is Volta and Turing


def behind_ampere_test(outline: Outline, node: ast.AST, function: Function) -> bool:
    """Whether a node is only evaluated on a GPU of compute capability 8.0 or higher.

    It stands in a branch of such a test, after it in `a and b`, or below a branch for older GPUs that leaves the block.
    """
    inside, parent = node, outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.And):
            before = parent.values[: parent.values.index(inside)] if inside in parent.values else []
            if any(_needs(outline, value, function, is_true=True) for value in before):
                return True
        if isinstance(parent, (ast.If, ast.IfExp)) and inside is not parent.test:
            body = parent.body if isinstance(parent.body, list) else [parent.body]
            if _needs(outline, parent.test, function, is_true=inside in body):
                return True
        if any(_leaves_older(outline, statement, function) for statement in _before(parent, inside)):
            return True
        inside, parent = parent, outline.parents.get(parent)
    return any(_leaves_older(outline, statement, function) for statement in _before(parent, inside))


def _before(parent: ast.AST | None, node: ast.AST) -> list[ast.stmt]:
    """The statements that run before a statement of a block."""
    blocks = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
    block = next((b for b in blocks if isinstance(b, list) and node in b), [])
    return block[: block.index(node)] if block else []


def _leaves_older(outline: Outline, statement: ast.stmt, function: Function) -> bool:
    """Whether a statement leaves the block on older GPUs: `if major < 8: return torch.float16`."""
    if not isinstance(statement, ast.If) or not isinstance(statement.body[-1], (ast.Return, ast.Raise)):
        return False
    return not statement.orelse and _needs(outline, statement.test, function, is_true=False)


def _needs(outline: Outline, test: ast.expr, function: Function, *, is_true: bool) -> bool:
    """Whether a test has this value only on a GPU of compute capability 8.0 or higher."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _needs(outline, test.operand, function, is_true=not is_true)
    if isinstance(test, ast.BoolOp):
        parts = (_needs(outline, value, function, is_true=is_true) for value in test.values)
        return any(parts) if isinstance(test.op, ast.And) == is_true else all(parts)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        wanted = {True: (ast.GtE, ast.Gt), False: (ast.Lt, ast.LtE)}[is_true]
        limit = _limit(test.comparators[0])
        is_strict = isinstance(test.ops[0], (ast.Gt, ast.LtE))  # `> 7` and `not <= 7`, of a major number
        is_high = limit >= _AMPERE or (
            is_strict and limit == _AMPERE - 1 and isinstance(constant(test.comparators[0]), int)
        )
        return isinstance(test.ops[0], wanted) and is_high and _is_capability(outline, test.left, function)
    values = outline.values(text_of(test), function) if isinstance(test, (ast.Name, ast.Attribute)) else []
    return (
        len(values) == 1
        and not isinstance(values[0], type(test))
        and _needs(outline, values[0], function, is_true=is_true)
    )


def _limit(node: ast.expr) -> float:
    """The major number that a capability is compared with: of 8, 8.0, (8, 0) or 80."""
    first = node.elts[0] if isinstance(node, ast.Tuple) and node.elts else node
    value = constant(first)
    if not isinstance(value, (int, float)):
        return 0
    return value / 10 if value >= 10 * (_AMPERE - 1) else value


def _is_capability(outline: Outline, node: ast.expr, function: Function) -> bool:
    """Whether an expression is the compute capability of a GPU, or its major number."""
    base = node.value if isinstance(node, ast.Subscript) else node
    if _CAPABILITY.search(text_of(base)):
        return True
    return any("capability" in text_of(value) for value in outline.values(text_of(base), function))
