"""DeepSpeed configurations written as the attributes of a class: a dataclass, or one of plain attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from halfstep.check.config.kind import has_own_keys, is_deepspeed
from halfstep.check.config.literals import Literals
from halfstep.check.config.placement import is_for_deepspeed
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.precision.node import Block, Entry, Span

__all__ = ["class_configs"]


def class_configs(nodes: Sequence[ast.AST], literals: Literals, path: str) -> Iterator[tuple[Block, bool]]:
    """The attributes of classes that are a DeepSpeed configuration, and whether DeepSpeed reads them as they are.

    `bf16: dict = field(default_factory=lambda: {"enabled": True})` is the block `bf16`.
    """
    for node in nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        entries: list[Entry] = []
        for statement in node.body:
            target = _target(statement)
            value = _default(getattr(statement, "value", None)) if target is not None else None
            if target is not None and value is not None:
                entries.append(Entry(target.id, literals.span(target), literals.node(value)))
        # A base class may have further attributes, and other code may set them.
        root = Block(Span(literals.span(node).start, literals.span(node).end), tuple(entries), open=True)
        if any(isinstance(entry.value, Block) for entry in entries) and is_deepspeed(root):
            yield root, has_own_keys(root) and is_for_deepspeed(node, node.name, nodes, path)


def _target(statement: ast.stmt) -> ast.Name | None:
    """The attribute that a statement of a class body assigns."""
    if isinstance(statement, ast.AnnAssign):
        return statement.target if isinstance(statement.target, ast.Name) else None
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return targets[0] if len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def _default(value: ast.expr | None) -> ast.expr | None:
    """The value of an attribute: of `field(default_factory=lambda: {...})` the dictionary."""
    if not isinstance(value, ast.Call) or last_name(key_of(value.func)) not in {"field", "Field"}:
        return value
    arguments = {k.arg: k.value for k in value.keywords}
    factory = arguments.get("default_factory")
    if factory is not None:
        return factory.body if isinstance(factory, ast.Lambda) else None
    return arguments.get("default", value.args[0] if value.args else None)
