"""Dictionaries with values that a run chooses, by a ternary, `{"stage": 0 if single else 3}`, or by options: `{"stage": args.stage}`.

Either arm of a ternary is a configuration that some run uses. Ternaries with the same test are chosen together. A
dictionary with two different tests is left as it is: which of their arms meet in one run is not known. The defaults of
options do meet: they are the run that passes none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from halfstep.check.config.alternatives import Alternatives
from halfstep.check.config.config import Config
from halfstep.check.config.literals import Literals
from halfstep.precision.node import UNKNOWN, Block, Entry, Node, Scalar, Span, walk

__all__ = ["DefaultConfig", "arms_of", "with_defaults"]


@dataclass(frozen=True, eq=False)
class DefaultConfig(Config):
    """A configuration of the run that passes no options; it follows the one with the same text and undecided values."""


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


def with_defaults(
    config: Config, nodes: Sequence[ast.AST], literals: Literals, alternatives: Alternatives
) -> Iterator[DefaultConfig]:
    """The configuration with the default of each option that it names, if it names any with a default."""
    undecided = {n.span for n in walk(config.root) if isinstance(n, Scalar) and n.value is UNKNOWN and n.text}
    kinds = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Compare)
    named = [n for n in nodes if isinstance(n, kinds)] if undecided else []
    parts = {span: n for n in named if (span := literals.span(n)) in undecided}
    values = {span: _default(node, literals, alternatives) for span, node in parts.items()}
    known: dict[Span, Node] = {span: node for span, node in values.items() if node is not None}
    if known:
        fields = (config.settings, config.origin, config.strict, config.script)
        yield DefaultConfig(config.kind, _replaced(config.root, known), config.source, *fields, assembled=True)


def _default(node: ast.expr, literals: Literals, alternatives: Alternatives) -> Scalar | None:
    """The one literal that an expression may be, or the outcome of a comparison with it; None is no value of a key."""
    if isinstance(node, ast.Compare):
        left, right = ({c.value for c in alternatives.of(side)} for side in (node.left, node.comparators[0]))
        if len(node.ops) != 1 or not isinstance(node.ops[0], (ast.Eq, ast.NotEq)) or not len(left) == len(right) == 1:
            return None
        return Scalar(literals.span(node), (left == right) is isinstance(node.ops[0], ast.Eq))
    constants = list(alternatives.of(node))
    values = {(type(c.value), c.value) for c in constants} - {(type(None), None), (str, "")}
    return (
        Scalar(literals.span(node), constants[0].value)
        if len(values) == 1 == len({c.value for c in constants})
        else None
    )


def _replaced(block: Block, arms: dict[Span, Node]) -> Block:
    """The block with the values at these places replaced, at any depth."""

    def value(node: Node) -> Node:
        if isinstance(node, Block):
            return _replaced(node, arms)
        return arms.get(node.span, node) if isinstance(node, Scalar) else node

    return replace(block, entries=tuple(Entry(e.key, e.key_span, value(e.value)) for e in block.entries))
