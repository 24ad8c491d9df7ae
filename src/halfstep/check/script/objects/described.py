"""Values that only describe the machine or the run: entries of a table of information that nothing here reads again."""

from __future__ import annotations

import ast

from halfstep.check.regex import regex
from halfstep.check.script.objects.values import constant
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["is_described"]

_TABLE = regex(r"(^|_)(info|report|summary|metadata|environment|diagnostics|fingerprint|manifest)$")


def is_described(outline: Outline, node: ast.expr, function: Function) -> bool:
    """Whether an expression is an entry of a table such as `info`, under a key that occurs nowhere else in the file."""
    parent = outline.parents.get(node)
    if isinstance(parent, ast.Call) and key_of(parent.func) == "bool":
        node, parent = parent, outline.parents.get(parent)
    if isinstance(parent, ast.Dict) and node in parent.values:
        key = constant(parent.keys[parent.values.index(node)])
        owners = _owners(outline, parent, function)
    elif isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Subscript):
        key = constant(parent.targets[0].slice)
        owners = [key_of(parent.targets[0].value)]
    else:
        return False
    if not isinstance(key, str) or not any(_TABLE.search(last_name(owner)) for owner in owners):
        return False
    return sum(isinstance(n, ast.Constant) and n.value == key for n in ast.walk(outline.module.node)) == 1


def _owners(outline: Outline, table: ast.Dict, function: Function) -> list[str]:
    """The names that a dictionary has: of a variable, of what it updates, of an argument, or of a function that returns it."""
    parent = outline.parents.get(table)
    if isinstance(parent, ast.Dict):
        outer = (constant(key) for key, value in zip(parent.keys, parent.values, strict=True) if value is table)
        return [*(name for name in outer if isinstance(name, str)), *_owners(outline, parent, function)]
    if isinstance(parent, ast.Return):
        return [function.name]
    if isinstance(parent, ast.Assign):
        return [key_of(target) for target in parent.targets]
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and parent.func.attr == "update":
        return [key_of(parent.func.value)]
    return []
