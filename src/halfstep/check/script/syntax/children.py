"""The nodes of a syntax tree that are worth visiting, several times faster than the functions of ast."""

from __future__ import annotations

import ast
from functools import lru_cache

__all__ = ["all_children_of", "all_nodes", "all_statements", "blocks_of", "children_of"]

# Fields without nodes that rules look at, such as contexts and operators.
_SKIP = {"ctx", "op", "ops", "type_comment", "names", "level", "returns", "annotation", "type_params", "kind"}
_NO_NODES = {"ctx", "op", "ops", "type_comment", "level", "kind", "id", "attr", "arg", "module", "n", "s"}
_ALL_FIELDS: dict[type, tuple[str, ...]] = {}
_FIELDS: dict[type, tuple[str, ...]] = {}


def children_of(node: ast.AST) -> list[ast.AST]:
    """The children of a node that a rule could care about, in the order of the text."""
    kind = type(node)
    fields = _FIELDS.get(kind)
    if fields is None:
        fields = _FIELDS[kind] = tuple(f for f in kind._fields if f not in _SKIP)
    return _nodes_in(node, fields)


def all_children_of(node: ast.AST) -> list[ast.AST]:
    """The children of a node except contexts and operators, as ast.iter_child_nodes orders them."""
    kind = type(node)
    fields = _ALL_FIELDS.get(kind)
    if fields is None:
        fields = _ALL_FIELDS[kind] = tuple(f for f in kind._fields if f not in _NO_NODES)
    return _nodes_in(node, fields)


def _nodes_in(node: ast.AST, fields: tuple[str, ...]) -> list[ast.AST]:
    children: list[ast.AST] = []
    for name in fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            children += [v for v in value if isinstance(v, ast.AST)]
        elif isinstance(value, ast.AST):
            children.append(value)
    return children


def blocks_of(node: ast.AST | None) -> list[list[ast.stmt]]:
    """The lists of statements directly in a node."""
    return [b for name in ("body", "orelse", "finalbody") if isinstance(b := getattr(node, name, None), list)]


def all_statements(tree: ast.AST) -> list[ast.AST]:
    """The statements of a script, outer ones first; a tenth of its nodes. Handlers and cases are among them."""
    statements = [tree]
    for node in statements:  # grows
        for block in blocks_of(node):
            statements += block
        statements += getattr(node, "handlers", ())
        statements += getattr(node, "cases", ())
    return statements


@lru_cache(maxsize=1)
def all_nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Every node of a script except contexts and operators, outer ones first, as ast.walk orders them.

    Readers of configurations and several rules look at all of them, so the last script's are remembered.
    """
    nodes = [tree]
    for node in nodes:  # grows
        nodes += all_children_of(node)
    return tuple(nodes)
