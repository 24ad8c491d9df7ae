"""The children of a syntax node that are worth visiting, several times faster than ast.iter_child_nodes."""

from __future__ import annotations

import ast

__all__ = ["children_of"]

# Fields without nodes that rules look at, such as contexts and operators.
_SKIP = {"ctx", "op", "ops", "type_comment", "names", "level", "returns", "annotation", "type_params", "kind"}
_FIELDS: dict[type, tuple[str, ...]] = {}


def children_of(node: ast.AST) -> list[ast.AST]:
    """The children of a node that a rule could care about, in the order of the text."""
    kind = type(node)
    fields = _FIELDS.get(kind)
    if fields is None:
        fields = _FIELDS[kind] = tuple(f for f in kind._fields if f not in _SKIP)
    children: list[ast.AST] = []
    for name in fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            children.extend(v for v in value if isinstance(v, ast.AST))
        elif isinstance(value, ast.AST):
            children.append(value)
    return children
