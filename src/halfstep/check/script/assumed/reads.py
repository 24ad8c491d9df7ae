"""Expressions that read a setting: `args.amp`, `cfg["amp"]`, `cfg.get("amp", True)`, `getattr(args, "amp", False)`, a parameter `amp`."""

from __future__ import annotations

import ast

from halfstep.check.regex import regex
from halfstep.check.script.assumed.configurator import ANYWHERE, PARSED
from halfstep.check.script.syntax.names import key_of

__all__ = ["Place", "fallback", "is_read", "read_name", "without_case"]

Place = tuple[int, ...]  # the lines of the functions around a node, innermost first
_CONFIG = regex(r"(^|_)(args?|arguments|cfg|conf|configs?|opts?|options|hparams|hps|hp|params|flags|settings)$")
_PARTS = regex(r"\W+")
_TEXT = {"lower", "upper", "strip"}


def without_case(node: ast.expr | None) -> ast.expr | None:
    """The expression without changes of its spelling: `args.dtype` of `args.dtype.lower()` and `str(args.dtype or "").strip()`."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT:
            node = node.func.value
        elif isinstance(node, ast.Call) and key_of(node.func) == "str" and len(node.args) == 1:
            node = node.args[0]
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and isinstance(node.values[-1], ast.Constant):
            node = node.values[0] if len(node.values) == 2 else None
        else:
            return node


def read_name(node: ast.expr | None) -> str:
    """The last name of what an expression reads, if it could be a setting: `amp` of all forms above, and of `self.amp`."""
    if isinstance(node, ast.Call):
        key = _access(node)[1]
        return str(key.value) if isinstance(key, ast.Constant) else ""
    if isinstance(node, ast.Subscript):
        return node.slice.value if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str) else ""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_read(node: ast.expr, name: str, around: Place, params: frozenset[tuple[int, str]]) -> bool:
    """Whether an expression reads the setting of this name."""
    if isinstance(node, ast.Name):
        is_open = (ANYWHERE, name) in params or any((line, name) in params for line in around)
        return node.id == name and isinstance(node.ctx, ast.Load) and is_open
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        return False
    if isinstance(node, ast.Attribute):
        return node.attr == name and (_is_config(node.value) or (PARSED, key_of(node.value)) in params)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == name and _is_config(node.value)
    if isinstance(node, ast.Call):
        owner, key, _ = _access(node)
        return isinstance(key, ast.Constant) and key.value == name and owner is not None and _is_config(owner)
    return False


def fallback(node: ast.expr) -> ast.expr | None:
    """The default of `cfg.get("amp", default)` or `getattr(args, "amp", default)`."""
    owner, _, default = _access(node) if isinstance(node, ast.Call) else (None, None, None)
    return default if owner is not None and _is_config(owner) else None


def _access(call: ast.Call) -> tuple[ast.expr | None, ast.expr | None, ast.expr | None]:
    """The owner, the key and the default of `owner.get(key, default)` or `getattr(owner, key, default)`."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "get" and call.args:
        return call.func.value, call.args[0], call.args[1] if len(call.args) > 1 else None
    if isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) > 1:
        return call.args[0], call.args[1], call.args[2] if len(call.args) > 2 else None
    return None, None, None


def _is_config(owner: ast.expr) -> bool:
    """Whether an object has settings, by its name: `args`, `self.cfg`, `config["model"]`; not `model.config`, which is the model's own."""
    while isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and owner.func.attr == "get":
        owner = owner.func.value
    parts = [part.lower() for part in _PARTS.split(key_of(owner)) if part]
    first = next((index for index, part in enumerate(parts) if _CONFIG.search(part)), None)
    return first is not None and "model" not in parts[:first]
