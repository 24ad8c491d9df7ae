"""Scalers that nothing reads: the next assignment to their variable replaces them, or their function never reads the variable."""

from __future__ import annotations

import ast

from halfstep.check.script.objects.values import Scaler
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import chain, key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS
from halfstep.check.script.syntax.unread import reads_by_name

__all__ = ["is_unread_variable", "replaced_by"]

_BLOCKS = ("body", "orelse", "finalbody")
_MAX_STATEMENTS = 300  # between the two assignments


def is_unread_variable(script: Script, scaler: Scaler) -> bool:
    """Whether a function assigns a scaler to a variable of its own and never reads it, whatever others have under this name."""
    node, key = scaler.function.node, scaler.key
    statement = script.statement(scaler.node)
    if isinstance(node, ast.Module) or not key.isidentifier() or statement is None:
        return False
    if _value_for(statement, key) is None or reads_by_name(script.outline):
        return False
    own = set(ast.walk(statement))  # `scaler = scaler or GradScaler()`
    for part in ast.walk(node):
        if isinstance(part, (ast.Global, ast.Nonlocal)) and key in part.names:
            return False
        if isinstance(part, ast.Name) and part.id == key and isinstance(part.ctx, ast.Load) and part not in own:
            return False
    return True


def replaced_by(script: Script, scaler: Scaler) -> ast.expr | None:
    """What the variable of a scaler gets, whatever the conditions, before anything may read the scaler; None if something may."""
    statement = script.statement(scaler.node)
    bindings = script.outline.bindings.get(scaler.key, ())
    later = [b for b in bindings[:MAX_BINDINGS] if b.function is scaler.function and b.value is not None]
    if statement is None or not any(_line(b.node) > _line(statement) for b in later):
        return None
    if _value_for(statement, scaler.key) is None:
        return None
    own = {function.name for function in script.outline.functions}
    passed = 0
    inner: ast.AST = statement
    for outer in script.above(statement):
        for name in _BLOCKS:
            block = getattr(outer, name, None)
            after = block[block.index(inner) + 1 :] if isinstance(block, list) and inner in block else []
            for following in after:
                passed += 1
                if passed > _MAX_STATEMENTS or _may_read(following, scaler.key, own):
                    return None
                if (value := _value_for(following, scaler.key)) is not None:
                    return value
        if not isinstance(outer, ast.If | ast.With):
            return None  # a function, or a loop, whose next iteration may read it
        inner = outer
    return None


def _line(node: ast.AST | None) -> int:
    return getattr(node, "lineno", 0)


def _value_for(statement: ast.stmt, key: str) -> ast.expr | None:
    """What a statement assigns to a variable, and to nothing else."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    return value if len(targets) == 1 and key_of(targets[0]) == key else None


def _may_read(statement: ast.stmt, key: str, own: set[str]) -> bool:
    """Whether a statement reads a variable, leaves the block, or calls a function of this file, which may read it."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom | ast.Break | ast.Continue):
            return True
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and key_of(node) == key:
            return True
        if isinstance(node, ast.Call):
            called = chain(node.func)
            is_method = called[:1] == ("self",) and len(called) == 2
            passes_self = any(isinstance(a, ast.Name) and a.id == "self" for a in node.args)
            if not called or called[-1] in own or is_method or passes_self or called[0] == "super":
                return True
    return False
