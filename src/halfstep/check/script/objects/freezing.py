"""Loops over the parameters of a model that freeze some of them or replace their data."""

from __future__ import annotations

import ast
import re

from halfstep.check.script.objects.values import constant
from halfstep.check.script.objects.weights import Lineage
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["freezes", "freezing_loops"]


def freezing_loops(outline: Outline) -> tuple[tuple[ast.For, Function], ...]:
    """Loops over parameters that freeze them or replace their data."""
    loops = {}
    for name in ("parameters", "named_parameters", "modules", "named_modules"):
        for call, function in outline.calls.get(name, ()):
            node: ast.AST | None = call
            while node is not None and not isinstance(node, ast.stmt):
                node = outline.parents.get(node)
            if isinstance(node, ast.For):
                body = " ".join(ast.unparse(statement) for statement in node.body)
                if re.search(r"requires_grad(_\(| = )(?!True)|\.float\(\)|float32", body):
                    loops[node] = function
    return tuple(loops.items())


def freezes(lineage: Lineage, loop: ast.For, function: Function) -> bool:
    """Whether such a loop leaves nothing of a model to be trained in 16 bits."""
    owners = [p.value for p in ast.walk(loop.iter) if isinstance(p, ast.Attribute)]
    if not any(lineage.has(key_of(owner), function) for owner in owners):
        return False
    # A loop that chooses the layers to train, with the cast after it: those layers have 16 bits too.
    chooses = any(isinstance(n, ast.Assign) and constant(n.value) is True for n in ast.walk(loop))
    return not chooses or not any(
        c.may_be_low and c.function is function and c.node.lineno > loop.lineno for c in lineage.casts
    )
