"""What an expression is for one value of a setting: `torch.bfloat16 if cfg.precision == "bf16" else torch.float16` for "no".

Two switches often come from one setting by different tests, and agree for the values that their author thought of. The
values that the tests name are few, so each is tried: a value for which one switch is on and the other is off is a case
that a run can have.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from halfstep.check.script.syntax.evaluate import OPEN, value_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["Setting", "named_values", "setting_name"]

MAX_DEPTH = 6
_SAME = {"torch.half": "torch.float16", "torch.float": "torch.float32"}
_TEXT = {"lower", "strip", "upper"}
Scoped = tuple[ast.expr, Function]


@dataclass(frozen=True)
class Setting:
    """One value of a setting; `name` is the last name of the variable, attribute or entry that has it."""

    outline: Outline
    name: str
    value: str

    def of(self, node: ast.expr, function: Function, depth: int = MAX_DEPTH) -> object:
        """The constant or dtype that an expression then is; OPEN if that is not known."""
        return value_of(node, lambda leaf: self._leaf(leaf, function, depth))

    def _leaf(self, node: ast.expr, function: Function, depth: int) -> object:
        full = self.outline.names.full(node)
        if full.startswith("torch."):
            return _SAME.get(full, full)
        source = _source(self.outline, node, function) if depth else None
        if source is not None:
            return self.of(*source, depth - 1)
        return self.value if setting_name(node) == self.name else OPEN


def named_values(outline: Outline, expressions: list[Scoped], depth: int = MAX_DEPTH) -> dict[str, set[str]]:
    """The settings that expressions compare with strings, by last name, each with these strings."""
    values: dict[str, set[str]] = {}
    pending = [(node, function, depth) for node, function in expressions]
    while pending:
        node, function, left = pending.pop()
        for part in ast.walk(node):
            if isinstance(part, ast.Compare):
                strings = {c.value for c in ast.walk(part) if isinstance(c, ast.Constant) and isinstance(c.value, str)}
                if strings and setting_name(part.left):
                    values.setdefault(setting_name(part.left), set()).update(strings)
            source = _source(outline, part, function) if isinstance(part, (ast.Name, ast.Attribute)) else None
            if source is not None and left:
                pending.append((*source, left - 1))
    return values


def _source(outline: Outline, node: ast.expr, function: Function) -> Scoped | None:
    """The one expression that the file assigns to a variable or attribute."""
    key = key_of(node)
    sources = outline.sources(key, function) if key and key not in function.params else []
    return sources[0] if len(sources) == 1 and sources[0][0] is not node else None


def setting_name(node: ast.expr) -> str:
    """The last name of a setting: `precision` of `cfg.train.precision`, `cfg["precision"]` and `args.precision.lower()`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT:
        node = node.func.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        return str(node.args[0].value) if isinstance(node.args[0], ast.Constant) else ""
    if isinstance(node, ast.Subscript):
        return str(node.slice.value) if isinstance(node.slice, ast.Constant) else ""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
