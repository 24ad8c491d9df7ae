"""The modules of a model that code reaches through its getters: `model.get_model().mm_projector`, `model.get_projector()`."""

from __future__ import annotations

import ast

from halfstep.check.script.syntax.names import key_of

__all__ = ["path_of"]

_WHOLE = {"get_model", "get_base_model"}  # the model itself, perhaps without its head or adapters
_PREFIX = "get_"


def path_of(node: ast.expr | None) -> str:
    """A module as a path from the variable of its model: `model.projector` for `model.get_projector()`; "" if it is none."""
    if isinstance(node, ast.Attribute):
        owner = path_of(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    if isinstance(node, ast.IfExp):  # `model.get_model() if hasattr(model, "get_model") else model`
        first, other = path_of(node.body), path_of(node.orelse)
        return first if first == other else ""
    is_getter = isinstance(node, ast.Call) and not node.args and not node.keywords
    if isinstance(node, ast.Call) and is_getter and isinstance(node.func, ast.Attribute):
        owner, name = path_of(node.func.value), node.func.attr
        if not owner or not name.startswith(_PREFIX):
            return ""
        return owner if name in _WHOLE else f"{owner}.{name.removeprefix(_PREFIX)}"
    return key_of(node)
