"""Names that nothing in a file binds: what uses them raises NameError or AttributeError."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function

__all__ = ["is_bound", "own_lineage", "unbound_names", "unbound_scalers"]

_PLAIN_BASES = {"object", "Module", "ABC", "Generic", "Protocol", "LightningModule"}  # classes that assign no scaler
# What may add any attribute to an object of the class. A dataclass elsewhere in the file, or `setattr(args, ...)`, does not.
_DYNAMIC = regex(
    r"\bsetattr\(\s*(self|\w*(trainer|engine|runner|agent|obj)\w*)\b|\bself\.__dict__|\bvars\(self\)|__getattr(ibute)?__"
)
_OPEN = regex(r"mixin|base|abstract", re.IGNORECASE)  # classes for which others assign what they use
_BINDS = {"globals", "exec", "locals", "__builtins__"}
_USES = ("scale", "unscale", "scaler_step", "update", "save_scaler", "load_scaler", "get_scale")


def unbound_scalers(script: Script) -> Iterator[Event]:
    """The first use of each scaler that nothing in the file assigns: a variable, or an attribute of a class of its own."""
    if script.source.language == "notebook" or not any(
        i.full.split(".")[0] == "torch" for i in script.outline.names.imported
    ):
        return  # a cell may run another notebook, and a fragment shows no imports
    first: dict[tuple[str, str], Event] = {}  # by variable and class
    for event in sorted(script.events(*_USES), key=lambda e: getattr(e.node, "lineno", 0)):
        if _calls_method(event) and not _is_tested(script, event):
            first.setdefault((event.local.scaler, event.function.cls), event)
    for (key, _), event in list(first.items())[:MAX_BINDINGS]:
        is_plain = key.isidentifier() and not is_bound(script, key, event.function)
        if is_plain or (key.startswith("self.") and _lacks(script, key.removeprefix("self."), event.function)):
            yield event


def _calls_method(event: Event) -> bool:
    """Whether an event reads the scaler to call a method of it, rather than passing it on."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    return isinstance(func, ast.Attribute) and key_of(func.value) == event.local.scaler


def _is_tested(script: Script, event: Event) -> bool:
    """Whether a test asks first if there is such a name, or a handler catches that there is none."""
    last = event.local.scaler.rsplit(".", 1)[-1]
    asked = [g.text for g in (*event.guards, *event.local.guards)]
    asked += [ast.unparse(n.test) for n in script.above(event.node) if isinstance(n, ast.If | ast.IfExp)]
    is_asked = any(last in text and ("attr(" in text or _is_looked_up(text, event.node)) for text in asked)
    return is_asked or any(isinstance(node, ast.Try) and node.handlers for node in script.above(event.node))


def _is_looked_up(test: str, call: ast.AST) -> bool:
    """Whether a test looks for a key, `"scaler" in vars()`, other than in the checkpoint whose entry the call loads."""
    _, is_member, container = test.partition(" in ")
    container = container.removesuffix(".keys()")
    read = [ast.unparse(argument) for argument in call.args] if isinstance(call, ast.Call) else []
    return bool(is_member) and not any(text.startswith((f"{container}[", f"{container}.")) for text in read)


def _lacks(script: Script, name: str, function: Function) -> bool:
    """Whether a class has no attribute of a name, as far as its file shows: it assigns none and inherits none."""
    outline, cls = script.outline, function.cls
    lineage = own_lineage(script, cls)
    if not name.isidentifier() or not lineage or _OPEN.search(cls):
        return False
    if not any("__init__" in outline.classes.get(member, {}) for member in lineage):
        return False
    if _DYNAMIC.search(script.source.text):
        return False
    stored = (n for n in ast.walk(script.tree) if isinstance(n, (ast.Name, ast.Attribute, ast.FunctionDef)))
    return not any(_stores(node, name) for node in stored)


def own_lineage(script: Script, cls: str) -> set[str]:
    """A class of the file and its base classes, if all of them are in the file or assign no scaler; else none."""
    lineage: set[str] = set()
    todo = [cls] if cls else []
    while todo:
        name = todo.pop()
        lineage.add(name)
        for base in script.outline.bases.get(name, ()):
            last = ast.unparse(base).partition("[")[0].rsplit(".", 1)[-1]
            if isinstance(base, ast.Name) and last in script.outline.classes:
                todo += [last] if last not in lineage else []
            elif last not in _PLAIN_BASES:
                return set()
    return lineage


def _stores(node: ast.Name | ast.Attribute | ast.FunctionDef, name: str) -> bool:
    """Whether a node defines a name: an assignment to it, to an attribute of any object, or a property."""
    if isinstance(node, ast.FunctionDef):
        return node.name == name
    return not isinstance(node.ctx, ast.Load) and (node.id if isinstance(node, ast.Name) else node.attr) == name


def unbound_names(script: Script) -> dict[str, ast.Name]:
    """The first read of each name that nothing in a file binds; none if another file, or a string, may bind names in it."""
    nodes = list(all_nodes(script.tree))
    reads: dict[str, ast.Name] = {}
    bound = {*dir(builtins), "__file__", "__doc__", "__name__", "__path__", "__spec__", "__class__"}
    for node in nodes:
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                bound.add(node.id)
            elif node.id in _BINDS:
                return {}
            else:
                reads.setdefault(node.id, node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            if node.name == "*":
                return {}
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping)):
            bound.add(getattr(node, "name", None) or getattr(node, "rest", None) or "")
        elif isinstance(node, ast.Global):
            return {}  # another file may assign the variables of this one
    return {name: node for name, node in reads.items() if name not in bound}


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
