"""Enums of strings as the strings themselves, so that a precision chosen by an enum reads like one chosen by a name.

class Precision(Enum):                              Precision(name)                       name
FP16 = "fp16"                                   self.precision is Precision.FP16      self.precision == "fp16"
@property                                       self.precision.dtype                  {"fp16": torch.float16, ...}[self.precision]
def dtype(self): return {...}[self]
"""

from __future__ import annotations

import ast
import copy
from typing import Any

from halfstep.check.script.syntax.children import statements_in
from halfstep.check.script.syntax.names import key_of

__all__ = ["write_members"]

_PROPERTIES = {"property", "cached_property"}


def write_members(tree: ast.Module, *, with_properties: bool = True) -> None:
    """Replace members, conversions, tests and, unless messages are to show them, short properties of the enums of strings of a file."""
    enums = {node.name: node for node in statements_in(tree) if isinstance(node, ast.ClassDef) and _is_enum(node)}
    members = {name: _members(node) for name, node in enums.items()}
    members = {name: own for name, own in members.items() if own}
    if members:
        _Writer(members, {name: _results(enums[name]) for name in members if with_properties}).visit(tree)


def _is_enum(node: ast.ClassDef) -> bool:
    return any(key_of(base).rpartition(".")[2] in {"Enum", "StrEnum"} for base in node.bases)


def _members(node: ast.ClassDef) -> dict[str, str]:
    """The strings of the members of an enum; none if one of them is something else."""
    strings = {}
    for part in node.body:
        if isinstance(part, ast.Assign):
            target, value = part.targets[0], part.value
            if not (isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str)):
                return {}
            strings[target.id] = value.value
    return strings


def _results(node: ast.ClassDef) -> dict[str, ast.expr]:
    """What the properties of an enum return that are no more than one expression of `self`."""
    results = {}
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and {key_of(d) for d in part.decorator_list} & _PROPERTIES:
            last = part.body[-1]
            is_short = len(part.body) == 1 or (len(part.body) == 2 and isinstance(part.body[0], ast.Expr))
            if is_short and isinstance(last, ast.Return) and last.value is not None:
                results[part.name] = last.value
    return results


class _Writer(ast.NodeTransformer):
    def __init__(self, members: dict[str, dict[str, str]], results: dict[str, dict[str, ast.expr]]) -> None:
        self.members = members
        self.results = results

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return node if node.name in self.members else self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        owner = key_of(node.value)
        if node.attr in self.members.get(owner, ()):
            return ast.copy_location(ast.Constant(self.members[owner][node.attr]), node)
        inner = self.visit(node.value)
        if node.attr == "value" and isinstance(inner, ast.Constant) and not isinstance(node.value, ast.Constant):
            return inner
        for cls, results in self.results.items() if isinstance(node.ctx, ast.Load) else ():
            is_member = owner.rpartition(".")[0] == cls or _is_named(owner, cls)
            if node.attr in results and is_member:
                return self._inlined(results[node.attr], inner, node)
        node.value = inner
        return node

    def _inlined(self, result: ast.expr, owner: ast.expr, node: ast.expr) -> ast.expr:
        """The expression of a property, for one object."""
        written = self.visit(_Owner(owner).visit(copy.deepcopy(result)))
        for part in ast.walk(written):
            if isinstance(part, ast.expr):
                ast.copy_location(part, node)
        return written  # type: ignore[no-any-return]

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        is_conversion = key_of(node.func) in self.members and len(node.args) == 1 and not node.keywords
        return node.args[0] if is_conversion else node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in node.comparators):
            plain = {ast.Is: ast.Eq(), ast.IsNot: ast.NotEq()}
            node.ops = [plain.get(type(op), op) for op in node.ops]
        return node


def _is_named(key: str, cls: str) -> bool:
    """Whether a variable is named like its class: `self.precision` of `Precision`, `amp_dtype` of `AmpDtype`."""
    name, own = key.rpartition(".")[2].replace("_", "").lower(), cls.lower()
    return bool(name) and (name in own or own in name)


class _Owner(ast.NodeTransformer):
    """Puts an object in the place of `self`."""

    def __init__(self, owner: ast.expr) -> None:
        self.owner = owner

    def visit_Name(self, node: ast.Name) -> Any:
        return copy.deepcopy(self.owner) if node.id == "self" else node
