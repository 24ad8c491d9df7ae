"""What switches a region on: its `enabled`, or the choice between it and `nullcontext()`."""

from __future__ import annotations

import ast

from halfstep.check.script.objects.values import Autocast, argument
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["switch_of"]


def switch_of(script: Script, region: Autocast) -> tuple[ast.expr, Function] | None:
    """The expression that is true where a region is enabled, with its function; None if the text shows none."""
    enabled = argument(region.node, None, "enabled")
    if enabled is not None:
        return enabled, region.function
    node: ast.AST = region.node
    for parent in script.above(region.node):
        if isinstance(parent, ast.IfExp):
            other = parent.orelse if node is parent.body else parent.body
            is_choice = node is not parent.test and _is_null(other)
            return (_when(parent.test, is_true=node is parent.body), region.function) if is_choice else None
        if isinstance(parent, (ast.Assign, ast.Return)):
            return _by_branch(script, region, parent) if parent.value is node else None
        node = parent
    return None


def _by_branch(
    script: Script, region: Autocast, statement: ast.Assign | ast.Return
) -> tuple[ast.expr, Function] | None:
    """The test of the `if` in whose branch a region is assigned or returned, where the other way has a null context."""
    block = script.outline.parents.get(statement)
    if not isinstance(block, ast.If) or statement not in (*block.body, *block.orelse):
        return None
    if isinstance(statement, ast.Return):
        around = script.outline.parents.get(block)
        body: list[ast.stmt] = getattr(around, "body", [])
        below = body[body.index(block) + 1 :] if block in body else []
        is_body = statement in block.body
        others = (block.orelse or below) if is_body else block.body
        values = [s.value for s in others if isinstance(s, ast.Return)]
    else:
        key = key_of(statement.targets[0])
        bound = script.outline.lookup(key, region.function) if key else []
        values = [b.value for b in bound if b.value is not region.node] if len(bound) == 2 else []
    if len(values) != 1 or not _is_null(values[0]):
        return None
    return _when(block.test, is_true=statement in block.body), region.function


def _is_null(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and last_name(key_of(node.func)) == "nullcontext"


def _when(test: ast.expr, *, is_true: bool) -> ast.expr:
    """A test, or its contrary."""
    if is_true:
        return test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
