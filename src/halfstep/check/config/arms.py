"""Dictionaries with values chosen by a ternary, `{"stage": 0 if single else 3}`: one dictionary for each arm.

Either arm is a configuration that some run uses. Ternaries with the same test are chosen together. A dictionary with two
different tests is left as it is: which of their arms meet in one run is not known.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from halfstep.check.config.literals import Literals
from halfstep.precision.node import Block, Entry, Node, Scalar, Span, walk

__all__ = ["arms_of"]


def arms_of(root: Block, node: ast.AST, literals: Literals) -> Iterator[Block]:
    """The dictionary `node`, read as `root`, for each arm of its ternaries; `root` itself if it has none."""
    ternaries = {literals.span(n): n for n in ast.walk(node) if isinstance(n, ast.IfExp)}
    values = {inner.span for inner in walk(root) if isinstance(inner, Scalar)}
    chosen = {span: n for span, n in ternaries.items() if span in values}
    if not chosen or len({ast.dump(n.test) for n in chosen.values()}) > 1:
        yield root
        return
    for name in ("body", "orelse"):
        yield _replaced(root, {span: literals.node(getattr(n, name)) for span, n in chosen.items()})


def _replaced(block: Block, arms: dict[Span, Node]) -> Block:
    """The block with the values at these places replaced, at any depth."""

    def value(node: Node) -> Node:
        if isinstance(node, Block):
            return _replaced(node, arms)
        return arms.get(node.span, node) if isinstance(node, Scalar) else node

    return replace(block, entries=tuple(Entry(e.key, e.key_span, value(e.value)) for e in block.entries))
