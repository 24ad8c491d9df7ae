"""Names that nothing in a file binds: what uses them raises NameError or AttributeError."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function

__all__ = ["is_bound", "unbound_scalers"]

_PLAIN_BASES = {"object", "Module", "ABC"}  # classes that assign no scaler
_DYNAMIC = regex(r"\bsetattr\(|__getattr(ibute)?__|__dict__|\bvars\(|__slots__|namedtuple|@\w*\.?dataclass")
_USES = ("scale", "unscale", "scaler_step")


def unbound_scalers(script: Script) -> Iterator[Event]:
    """The first use of each scaler that nothing in the file assigns: a variable, or an attribute of a class of its own."""
    if script.source.cells or not any(i.full.split(".")[0] == "torch" for i in script.outline.names.imported):
        return  # a cell may run another notebook, and a fragment shows no imports
    first: dict[tuple[str, str], Event] = {}  # by variable and class
    for event in sorted(script.events(*_USES), key=lambda e: getattr(e.node, "lineno", 0)):
        first.setdefault((event.local.scaler, event.function.cls), event)
    for (key, _), event in list(first.items())[:MAX_BINDINGS]:
        is_plain = key.isidentifier() and not is_bound(script, key, event.function)
        if is_plain or (key.startswith("self.") and _lacks(script, key.removeprefix("self."), event.function)):
            yield event


def _lacks(script: Script, name: str, function: Function) -> bool:
    """Whether a class has no attribute of a name, as far as its file shows: it assigns none and inherits none."""
    outline, cls = script.outline, function.cls
    bases = {ast.unparse(base).rsplit(".", 1)[-1] for base in outline.bases.get(cls, ())}
    if not name.isidentifier() or not cls or bases - _PLAIN_BASES or "mixin" in cls.lower():
        return False
    if "__init__" not in outline.classes.get(cls, {}) or _DYNAMIC.search(script.source.text):
        return False
    stored = (n for n in ast.walk(script.tree) if isinstance(n, (ast.Name, ast.Attribute, ast.FunctionDef)))
    return not any(_stores(node, name) for node in stored)


def _stores(node: ast.Name | ast.Attribute | ast.FunctionDef, name: str) -> bool:
    """Whether a node defines a name: an assignment to it, to an attribute of any object, or a property."""
    if isinstance(node, ast.FunctionDef):
        return node.name == name
    return not isinstance(node.ctx, ast.Load) and (node.id if isinstance(node, ast.Name) else node.attr) == name


def is_bound(script: Script, name: str, function: Function) -> bool:
    """Whether anything in a file may bind a name: an import, an assignment, a definition or a parameter."""
    outline = script.outline
    if name in outline.names.table or name in outline.classes or outline.bindings.get(name):
        return True
    if any(f.name == name or name in f.params for f in (function, *outline.functions)):
        return True
    for node in ast.walk(script.tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return True
        if isinstance(node, ast.Name) and (
            node.id in {"globals", "exec"} or (node.id == name and not isinstance(node.ctx, ast.Load))
        ):
            return True
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) and node.name == name:
            return True
        if isinstance(node, (ast.arg, ast.alias)) and name in {
            getattr(node, "arg", ""),
            getattr(node, "asname", ""),
            getattr(node, "name", ""),
        }:
            return True
    return False
