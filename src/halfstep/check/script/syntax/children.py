"""The nodes of a syntax tree that are worth visiting, several times faster than the functions of ast."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import lru_cache
from typing import Any

__all__ = [
    "SIMPLE",
    "all_children_of",
    "all_nodes",
    "all_statements",
    "blocks_of",
    "children_of",
    "nodes_in",
    "parts_of",
    "statements_in",
]

# Fields without nodes that rules look at, such as contexts and operators.
_NO_NODES = {
    "ctx", "op", "ops", "type_comment", "level", "kind", "id", "attr", "arg", "module", "n", "s", "conversion", "simple",
}  # fmt: skip
_SKIP = {*_NO_NODES, "names", "returns", "annotation", "type_params"}
_ALL_FIELDS: dict[type, tuple[str, ...]] = {}
_FIELDS: dict[type, tuple[str, ...]] = {}
_BLOCKS: dict[type, tuple[str, ...]] = {}
_LEAVES = {ast.Name, ast.Constant}  # more than half of the nodes
# Statements without a block: 79 % of the statements in transformers.
SIMPLE = frozenset({
    ast.AnnAssign, ast.Assert, ast.Assign, ast.AugAssign, ast.Delete, ast.Expr, ast.Import, ast.ImportFrom, ast.Pass,
    ast.Raise, ast.Return,
})  # fmt: skip
# 80 % of the nodes with children are of these kinds (transformers); naming the children is 1.4 times as fast as a loop over fields.
_COMMON: dict[type, Callable[[Any], list[ast.AST]]] = {
    ast.Assign: lambda node: [*node.targets, node.value],
    ast.Attribute: lambda node: [node.value],
    ast.BinOp: lambda node: [node.left, node.right],
    ast.BoolOp: lambda node: [*node.values],
    ast.Call: lambda node: [node.func, *node.args, *node.keywords],
    ast.Compare: lambda node: [node.left, *node.comparators],
    ast.Constant: lambda _: [],
    ast.Expr: lambda node: [node.value],
    ast.If: lambda node: [node.test, *node.body, *node.orelse],
    ast.JoinedStr: lambda node: [*node.values],
    ast.List: lambda node: [*node.elts],
    ast.Name: lambda _: [],
    ast.Subscript: lambda node: [node.value, node.slice],
    ast.Tuple: lambda node: [*node.elts],
    ast.UnaryOp: lambda node: [node.operand],
    ast.keyword: lambda node: [node.value],
}


def children_of(node: ast.AST) -> list[ast.AST]:
    """The children of a node that a rule could care about, in the order of the text."""
    kind = type(node)
    if (common := _COMMON.get(kind)) is not None:
        return common(node)
    fields = _FIELDS.get(kind)
    if fields is None:
        fields = _FIELDS[kind] = tuple(f for f in kind._fields if f not in _SKIP)
    return _nodes_in(node, fields)


def all_children_of(node: ast.AST) -> list[ast.AST]:
    """The children of a node except contexts and operators, as ast.iter_child_nodes orders them."""
    kind = type(node)
    if (common := _COMMON.get(kind)) is not None:
        return common(node)
    fields = _ALL_FIELDS.get(kind)
    if fields is None:
        fields = _ALL_FIELDS[kind] = tuple(f for f in kind._fields if f not in _NO_NODES)
    return _nodes_in(node, fields)


def _nodes_in(node: ast.AST, fields: tuple[str, ...]) -> list[ast.AST]:
    children: list[ast.AST] = []
    for name in fields:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            children.append(value)
        elif value and isinstance(value, list):
            children += [v for v in value if isinstance(v, ast.AST)]
    return children


def blocks_of(node: ast.AST | None) -> list[list[ast.stmt]]:
    """The lists of statements directly in a node."""
    return [b for name in ("body", "orelse", "finalbody") if isinstance(b := getattr(node, name, None), list)]


def parts_of(node: ast.AST) -> list[list[ast.AST]]:
    """The lists of statements directly in a node, and those of its handlers and cases; most statements have none."""
    kind = type(node)
    fields = _BLOCKS.get(kind)
    if fields is None:
        names = ("body", "orelse", "finalbody", "handlers", "cases")
        fields = _BLOCKS[kind] = tuple(name for name in names if name in kind._fields)
    return [part for name in fields if isinstance(part := getattr(node, name, None), list)] if fields else []


@lru_cache(maxsize=1)
def all_statements(tree: ast.AST) -> tuple[ast.AST, ...]:
    """The statements of a script, outer ones first; a tenth of its nodes. Handlers and cases are among them."""
    return tuple(statements_in(tree))


def statements_in(node: ast.AST) -> list[ast.AST]:
    """A node and the statements in it, outer ones first."""
    statements = [node]
    for inner in statements:  # grows
        if type(inner) not in SIMPLE:
            for part in parts_of(inner):
                statements += part
    return statements


@lru_cache(maxsize=1)
def all_nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Every node of a script except contexts and operators, outer ones first, as ast.walk orders them.

    Readers of configurations and several rules look at all of them, so the last script's are remembered.
    """
    return tuple(nodes_in(tree))


def nodes_in(node: ast.AST) -> list[ast.AST]:
    """A node and every node in it except contexts and operators, outer ones first: ast.walk in a third of the time."""
    nodes = [node]
    for inner in nodes:  # grows
        if type(inner) not in _LEAVES:
            nodes += all_children_of(inner)
    return nodes
