"""Expressions that read a setting: `args.amp`, `cfg["amp"]`, `cfg.get("amp", True)`, `getattr(args, "amp", False)`, a parameter `amp`."""

from __future__ import annotations

import ast

from halfstep.check.regex import regex
from halfstep.check.script.syntax.names import key_of

__all__ = ["Place", "is_read", "read_name", "without_case"]

Place = tuple[int, ...]  # the lines of the functions around a node, innermost first
_CONFIG = regex(r"(^|_)(args?|arguments|cfg|conf|configs?|opts?|options|hparams|hps|hp|params|flags|settings)$")
_PARTS = regex(r"\W+")
_TEXT = {"lower", "upper", "strip"}


def without_case(node: ast.expr | None) -> ast.expr | None:
    """The expression without changes of its case: `args.dtype` of `args.dtype.lower()`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT:
        node = node.func.value
    return node


def read_name(node: ast.expr | None) -> str:
    """The last name of what an expression reads, if it could be a setting: `amp` of all forms above, and of `self.amp`."""
    if isinstance(node, ast.Call):
        key = _key(node)
        return str(key.value) if isinstance(key, ast.Constant) else ""
    if isinstance(node, ast.Subscript):
        return node.slice.value if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str) else ""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_read(node: ast.expr, name: str, around: Place, params: frozenset[tuple[int, str]]) -> bool:
    """Whether an expression reads the setting of this name."""
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Load) and any((line, name) in params for line in around)
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        return False
    if isinstance(node, ast.Attribute):
        return node.attr == name and _is_config(node.value)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == name and _is_config(node.value)
    if isinstance(node, ast.Call):
        key = _key(node)
        owner = node.args[0] if isinstance(node.func, ast.Name) and node.args else getattr(node.func, "value", None)
        return isinstance(key, ast.Constant) and key.value == name and owner is not None and _is_config(owner)
    return False


def _key(call: ast.Call) -> ast.expr | None:
    """The key of `owner.get(key)` or `getattr(owner, key)`."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "get" and call.args:
        return call.args[0]
    return (
        call.args[1] if isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) > 1 else None
    )


def _is_config(owner: ast.expr) -> bool:
    """Whether an object has settings, by its name: `args`, `self.cfg`, `config["model"]`; not `model.config`, which is the model's own."""
    while isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and owner.func.attr == "get":
        owner = owner.func.value
    parts = [part.lower() for part in _PARTS.split(key_of(owner)) if part]
    first = next((index for index, part in enumerate(parts) if _CONFIG.search(part)), None)
    return first is not None and "model" not in parts[:first]
