"""Whether the loss of a backward comes from an autocast region, in the same function or in one that it calls."""

from __future__ import annotations

import ast

from halfstep.check.script.flow.event import Event
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["comes_from"]

MAX_DEPTH = 3  # assignments between a value and the loss


def comes_from(opened: Event, event: Event, outline: Outline) -> bool:
    """Whether the loss of a backward is computed in the region that an event opens, or from values that are."""
    block = opened.node
    if not isinstance(event.node, ast.Call):
        return False
    if event.node in set(ast.walk(block)):
        return True  # HS140 reports the backward's place too
    loss = [part for node in (event.node.func, *event.node.args) for part in ast.walk(node)]
    if opened.function is event.function:
        inside = _assigned(block)
        # Any part of `losses["total"]`, `out.loss` or `sum(losses.values())` that the block assigns.
        if inside & {key_of(part) for part in loss}:
            return True
        return bool(inside & _behind({p.id for p in loss if isinstance(p, ast.Name)}, event.function, outline, 1))
    depth = len(event.roots)
    if opened.roots[:depth] != event.roots or len(opened.roots) == depth or not _returns(opened, outline):
        return False
    call = opened.roots[depth]
    if call in loss:
        return True
    statement: ast.AST | None = call
    while statement is not None and not isinstance(statement, ast.stmt):
        statement = outline.parents.get(statement)
    inside = _assigned(statement) if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else set()
    return bool(inside & _behind({p.id for p in loss if isinstance(p, ast.Name)}, event.function, outline, MAX_DEPTH))


def _returns(opened: Event, outline: Outline) -> bool:
    """Whether the function of a region returns what the region computes."""
    inside = _assigned(opened.node)
    block = set(ast.walk(opened.node))
    for node in ast.walk(opened.function.node):
        if isinstance(node, ast.Return) and node.value is not None:
            names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            if node in block or inside & _behind(names, opened.function, outline, MAX_DEPTH):
                return True
    return False


def _behind(names: set[str], function: Function, outline: Outline, depth: int) -> set[str]:
    """Variables, and those they are computed from in a function."""
    every = set(names)
    for _ in range(depth):
        bound = [b for name in names for b in outline.lookup(name, function) if b.function is function]
        names = {n.id for b in bound if b.value is not None for n in ast.walk(b.value) if isinstance(n, ast.Name)}
        names -= every
        every |= names
    return every


def _assigned(block: ast.AST) -> set[str]:
    return {key for node in ast.walk(block) for key in _stored(node)} - {"self", ""}


def _stored(node: ast.AST) -> tuple[str, ...]:
    """The variables that a node assigns: for `losses["ce"] = ...` both the item and the dictionary."""
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) or not isinstance(node.ctx, ast.Store):
        return ()
    return (key_of(node), key_of(node.value)) if isinstance(node, ast.Subscript) else (key_of(node),)
