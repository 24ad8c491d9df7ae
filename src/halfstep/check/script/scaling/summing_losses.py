"""Losses of the file's own that sum the outputs of a model as they are: a Dice loss without a cast."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.modules import attribute_values, created_classes
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.scope import CallSite

__all__ = ["summing_losses"]

_LOSS = regex(r"loss|crit|dice|tversky|jaccard")
_CASTS = regex(r"float\(|float32|float64|double|autocast|\.to\(|type_as|dtype")
_MODULES = {"torch", "F", "nn", "functional", "self"}
MAX_DEPTH = 3  # losses inside of losses


def summing_losses(script: Script) -> Iterator[tuple[CallSite, ast.Call]]:
    """The calls of such losses, each with the sum in it of which nothing but the outputs decides the format."""
    outline = script.outline
    for name, sites in outline.calls.items():
        if not _LOSS.search(name.lower()):
            continue
        for site in sites:
            target = outline.call_target(site.call, site.function)
            if target is None or target.name == "__init__":
                values = outline.values(key_of(site.call.func), site.function) if key_of(site.call.func) else []
                classes = set().union(*(created_classes(outline, v) for v in values)) if values else set()
                forwards = [outline.classes[cls].get("forward") for cls in classes]
                target = forwards[0] if len(forwards) == 1 else None
            reduced = _sum_in(script, target, MAX_DEPTH) if target is not None and site.call.args else None
            if reduced is not None:
                yield site, reduced


def _sum_in(script: Script, function: Function, depth: int) -> ast.Call | None:
    """The sum of values that a function computes from its first parameter alone, and casts nowhere."""
    params = function.params[1:] if function.method else function.params
    if len(params) < 2 or isinstance(function.node, ast.Module) or _CASTS.search(ast.unparse(function.node)):
        return None
    own = {params[0]}
    for statement in function.body:
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call):
                continue
            if _sums(script, node, own):
                return node
            inner = _inner(script, node, function) if node.args and _is_of(node.args[0], own) and depth else None
            summed = _sum_in(script, inner, depth - 1) if inner is not None and inner is not function else None
            if summed is not None:
                return summed
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                is_own = _is_of(node.value, own)
                own = own | {node.targets[0].id} if is_own else own - {node.targets[0].id}
    return None


def _inner(script: Script, call: ast.Call, function: Function) -> Function | None:
    """The forward of a loss that a module has as an attribute: `self.dice(pred, target)`."""
    values = attribute_values(script.outline, key_of(call.func), function)
    classes = set().union(*(created_classes(script.outline, v) for v in values)) if values else set()
    return script.outline.classes[classes.pop()].get("forward") if len(classes) == 1 else None


def _sums(script: Script, call: ast.Call, own: set[str]) -> bool:
    """Whether a call is a sum of values of the outputs' format."""
    if any(k.arg == "dtype" for k in call.keywords):
        return False
    if script.outline.names.full(call.func) == "torch.sum":
        return bool(call.args) and _is_of(call.args[0], own)
    func = call.func
    return isinstance(func, ast.Attribute) and func.attr == "sum" and _is_of(func.value, own)


def _is_of(node: ast.expr, own: set[str]) -> bool:
    """Whether an expression has the format of the outputs: nothing in it is a value of another kind than they, or a comparison."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - _MODULES
    is_test = any(isinstance(n, ast.Compare | ast.BoolOp | ast.Lambda | ast.Starred) for n in ast.walk(node))
    attributes = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    return (
        bool(names)
        and names <= own
        and not is_test
        and not attributes & {"shape", "size", "numel", "argmax", "item", "device"}
    )
