"""Branches beside those that attach adapters that train no weights of the model: they raise, or freeze all of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from halfstep.check.script.flow.guard import Guard
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.values import constant
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["spared_branches"]


def spared_branches(outline: Outline, functions: Iterable[Function], models: frozenset[str]) -> list[tuple[Guard, ...]]:
    """The conditions of each statement of some functions that raises, or that freezes every parameter of one of these models."""
    nodes = (node for function in dict.fromkeys(functions) for node in ast.walk(function.node))
    ends = (node for node in nodes if isinstance(node, ast.Raise) or _frozen(node) in models)
    return [own for own in (conditions_of(outline, node) for node in ends) if own]


def _frozen(node: ast.AST) -> str | None:
    """The model that a statement freezes: a loop over all parameters with `p.requires_grad = False` alone, or `requires_grad_(False)`."""
    if isinstance(node, ast.For):
        called = node.iter.func if isinstance(node.iter, ast.Call) else None
        is_all = isinstance(called, ast.Attribute) and called.attr in {"parameters", "named_parameters"}
        return (
            key_of(called.value) if isinstance(called, ast.Attribute) and is_all and all(map(_of, node.body)) else None
        )
    return _of(node) if isinstance(node, ast.Expr) else None


def _of(statement: ast.stmt) -> str | None:
    """What `x.requires_grad = False` and `x.requires_grad_(False)` switch off."""
    if isinstance(statement, ast.Assign):
        owner, _, name = key_of(statement.targets[0]).rpartition(".")
        return owner if name == "requires_grad" and constant(statement.value) is False else None
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    is_off = call.func.attr == "requires_grad_" and [constant(value) for value in values] == [False]
    return key_of(call.func.value) if is_off else None
