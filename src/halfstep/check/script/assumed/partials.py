"""Calls through a variable as calls of what it stands for, so that a load or a constructor reads the same in every form.

    load = partial(AutoModel.from_pretrained, name, dtype="auto")      load()        AutoModel.from_pretrained(name, dtype="auto")
    load = lambda name: AutoModel.from_pretrained(name)                load(base)    AutoModel.from_pretrained(base)
    load = AutoModel.from_pretrained                                   load(base)    AutoModel.from_pretrained(base)

Only loads of models, and classes that a partial creates, are written in place: of a variable that is assigned once.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from typing import Any

from halfstep.check.script.syntax.children import nodes_in, statements_in
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["write_partials"]

_LOADS = "from_pretrained"
_PARTIAL = {"partial", "functools.partial"}


def write_partials(tree: ast.Module, text: str) -> None:
    """Replace the calls of variables that stand for a load, or for a class with some of its arguments."""
    if "partial(" not in text and _LOADS not in text:
        return
    assigns = [s for s in statements_in(tree) if isinstance(s, ast.Assign) and len(s.targets) == 1]
    stands_for = {key_of(s.targets[0]): s.value for s in assigns if _is_callable(s.value)}
    stands_for.pop("", None)
    if stands_for:
        assigned = _assigned(tree)
        _Writer({key: value for key, value in stands_for.items() if assigned[key] == 1}).visit(tree)


def _assigned(tree: ast.Module) -> Counter[str]:
    """How often each variable is assigned, or is the name of a parameter, a function or a class."""
    assigned: Counter[str] = Counter()
    for node in nodes_in(tree):
        if isinstance(getattr(node, "ctx", None), ast.Store):
            assigned[key_of(node)] += 1
        elif isinstance(node, ast.arg):
            assigned[node.arg] += 1
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            assigned[node.name] += 1
    return assigned


def _is_callable(value: ast.expr) -> bool:
    """Whether a value stands for a load, or for a class with some of its arguments."""
    if isinstance(value, ast.Lambda):
        plain = value.args
        is_plain = not (plain.vararg or plain.kwarg or plain.kwonlyargs or plain.posonlyargs or plain.defaults)
        return is_plain and any(isinstance(n, ast.Call) and _is_load(n.func) for n in ast.walk(value.body))
    if isinstance(value, ast.Call) and key_of(value.func) in _PARTIAL and value.args:
        return _is_load(value.args[0]) or last_name(key_of(value.args[0]))[:1].isupper()
    return _is_load(value)


def _is_load(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == _LOADS


class _Writer(ast.NodeTransformer):
    def __init__(self, stands_for: dict[str, ast.expr]) -> None:
        self.stands_for = stands_for

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        value = self.stands_for.get(key_of(node.func))
        written = _written(value, node) if value is not None else None
        return ast.copy_location(written, node) if written is not None else node


def _written(value: ast.expr, call: ast.Call) -> ast.expr | None:
    """What a call of such a variable runs; None where the arguments do not fit."""
    if isinstance(value, ast.Lambda):
        names = [arg.arg for arg in value.args.args]
        if call.keywords or len(names) != len(call.args):
            return None
        return _Arguments(dict(zip(names, call.args, strict=True))).visit(copy.deepcopy(value.body))  # type: ignore[no-any-return]
    if not isinstance(value, ast.Call):
        return ast.Call(copy.deepcopy(value), call.args, call.keywords)
    own = copy.deepcopy(value)
    replaced = {keyword.arg for keyword in call.keywords}
    keywords = [k for k in own.keywords if k.arg is None or k.arg not in replaced]
    return ast.Call(own.args[0], [*own.args[1:], *call.args], [*keywords, *call.keywords])


class _Arguments(ast.NodeTransformer):
    """Puts arguments in the place of the parameters of a lambda."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> Any:
        return copy.deepcopy(self.values.get(node.id, node))
