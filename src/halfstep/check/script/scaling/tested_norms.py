"""Norms of gradients that the loss scale does not change: those that only divide gradients, and those that are only tested for inf and NaN."""

from __future__ import annotations

import ast
import re
from functools import partial

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.tensors import is_gradient
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["only_normalizes", "only_tested"]

_FINITE = regex(r"finite|is_?nan|is_?inf(?!er)|overflow", re.IGNORECASE)


def only_normalizes(script: Script, event: Event) -> bool:
    """Whether a norm only divides gradients, as in adversarial training: the scale cancels in `grad / grad.norm()`."""
    statement = script.statement(event.node)
    if not isinstance(statement, ast.Assign) or statement.value is not event.node:
        return _divides_gradient(script, event.node, event.function)
    name = key_of(statement.targets[0])
    scope = event.function.node
    uses = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
    uses = [n for n in uses if not isinstance(_outside_arithmetic(script, n), (ast.Compare, ast.Call))]
    return bool(uses) and all(_divides_gradient(script, n, event.function) for n in uses)


def only_tested(script: Script, event: Event) -> bool:
    """Whether a norm is only tested for inf and NaN, which the scale does not change: `is_finite(float(norm))`."""
    statement = script.statement(event.node)
    if not isinstance(statement, ast.Assign) or statement.value is not event.node:
        return False
    name, scope = key_of(statement.targets[0]), ast.walk(event.function.node)
    uses = [n for n in scope if isinstance(n, (ast.Name, ast.Attribute)) and key_of(n) == name]
    loads = [n for n in uses if isinstance(n.ctx, ast.Load)]
    return bool(name and loads) and all(map(partial(_is_tested, script), loads))


def _is_tested(script: Script, node: ast.AST) -> bool:
    """Whether a number is an argument of a function that is named for values that are not finite."""
    for parent in script.above(node):
        if isinstance(parent, ast.Call):
            name = text_of(parent.func).rsplit(".", 1)[-1]
            if _FINITE.search(name):
                return True
            if name not in {"float", "item", "detach", "tensor", "as_tensor"}:
                return False
        elif not isinstance(parent, (ast.keyword, ast.Attribute)):
            return False
    return False


def _outside_arithmetic(script: Script, node: ast.AST) -> ast.AST | None:
    """What a number is used in: a test or a function of it, such as `norm != 0` and `torch.isnan(norm)`."""
    parent = script.outline.parents.get(node)
    is_test = isinstance(parent, ast.Call) and text_of(parent.func).rsplit(".", 1)[-1] in {"isnan", "isinf", "isfinite"}
    is_zero = isinstance(parent, ast.Compare) and all(constant(c) == 0 for c in parent.comparators)
    return parent if is_test or is_zero else None


def _divides_gradient(script: Script, node: ast.AST, function: Function) -> bool:
    """Whether a number, perhaps with a small constant added, is the divisor of a gradient."""
    parent = script.outline.parents.get(node)
    while isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add):
        node, parent = parent, script.outline.parents.get(parent)
    if not isinstance(parent, ast.BinOp) or not isinstance(parent.op, ast.Div) or parent.right is not node:
        return False
    parts = (part for part in ast.walk(parent.left) if isinstance(part, ast.expr))
    return any(is_gradient(script.outline, part, function) for part in parts)
