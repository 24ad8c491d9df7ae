"""Where an object goes that a function of the file creates and returns, `scaler` of `scaler = build_scaler(cfg)`, and where one comes from."""

from __future__ import annotations

import ast

from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import default_of, is_configured

__all__ = ["created_by", "is_never_created", "receivers_of", "returned_to"]

MAX_DEPTH = 3


def returned_to(outline: Outline, node: ast.AST, depth: int = MAX_DEPTH) -> str:
    """The variable that receives what a `return` statement returns; "" unless all calls in the file agree on its name."""
    keys = receivers_of(outline, node, depth)
    return keys.pop() if len(keys) == 1 else ""


def receivers_of(outline: Outline, node: ast.AST, depth: int = MAX_DEPTH) -> set[str]:
    """The variables that receive what a `return` statement returns; "" stands for another use of it."""
    if not isinstance(node, ast.Return) or not depth:
        return {""}
    around: ast.AST | None = node
    while around is not None and not isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
        around = outline.parents.get(around)
    builder = next((f for f in outline.functions if f.node is around), None)
    if builder is None:
        return {""}
    keys: set[str] = set()
    for call, caller in outline.calls.get(builder.name, ()):
        if outline.call_target(call, caller) is builder:
            parent: ast.AST | None = outline.parents.get(call)
            while isinstance(parent, (ast.IfExp, ast.BoolOp)):
                parent = outline.parents.get(parent)
            target = parent.targets[0] if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else None
            key = key_of(target)
            keys |= {key} if key or parent is None else receivers_of(outline, parent, depth - 1)
    return keys


def created_by(outline: Outline, node: ast.expr, function: Function, depth: int = MAX_DEPTH) -> list[str]:
    """The functions of libraries whose result an object may be, also as what functions of the file return; the name of a module itself.

    "" stands for what is unknown. None is left out.
    """
    names: list[str] = []
    sources = outline.sources(key_of(node), function) if key_of(node) else []
    for value, scope in sources or [(node, function)]:
        target = outline.call_target(value, scope) if isinstance(value, ast.Call) else None
        if target is not None and depth:
            returns = [n.value for n in ast.walk(target.node) if isinstance(n, ast.Return) and n.value is not None]
            names += [name for v in returns for name in created_by(outline, v, target, depth - 1)]
        elif not (isinstance(value, ast.Constant) and value.value is None):
            names.append(outline.names.full(value.func if isinstance(value, ast.Call) else value))
    return names


def is_never_created(outline: Outline, node: ast.expr, function: Function) -> bool:
    """Whether a variable is None wherever the file sets it or passes it, also by default: `def train(model, scaler=None)`."""
    key = key_of(node)
    values = _passed(outline, key, function) if key in function.params else outline.values(key, function) if key else []
    return bool(values) and all(isinstance(value, ast.Constant) and value.value is None for value in values)


def _passed(outline: Outline, name: str, function: Function) -> list[ast.expr]:
    """What the calls of the file pass for a parameter, with its default if one of them leaves it out; nothing if that is not certain."""
    sites = outline.calls.get(function.cls if function.name == "__init__" else function.name, ())
    calls = [call for call, caller in sites if outline.call_target(call, caller) is function]
    spread = any(k.arg is None for c in calls for k in c.keywords) or any(
        isinstance(a, ast.Starred) for c in calls for a in c.args
    )
    bound = any(b.function is function for b in outline.bindings.get(name, ()))
    if not calls or spread or bound or is_configured(function):
        return []
    values = [value for value, _ in outline.passed(name, function)]
    default = default_of(function, name) if len(values) < len(calls) else None
    return [*values, default] if default is not None else values if len(values) == len(calls) else []
