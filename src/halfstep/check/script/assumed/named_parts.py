"""States of objects that code gets by their names, as if each were written out.

    {k: getattr(self, k).state_dict() for k in ("net", "opt")}    {"net": self.net.state_dict(), "opt": self.opt.state_dict()}
    for k in PARTS: out[k] = getattr(self, k).state_dict()        out["net"] = self.net.state_dict(), and so on for each name

The names are a tuple or list in the place, or a constant with one value in the file: `PARTS = ("net", "opt")`, also of a class.
"""

from __future__ import annotations

import ast
import copy
from typing import TypeVar

from halfstep.check.script.syntax.children import parts_of
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["write_named_parts"]

MAX_NAMES = 12
_STATES = {"state_dict", "load_state_dict"}
_Node = TypeVar("_Node", bound=ast.AST)


def write_named_parts(tree: ast.Module, text: str) -> None:
    """Replace the loops and comprehensions over names of objects whose states are saved or restored."""
    if "state_dict" not in text or not ("getattr(" in text or "__dict__[" in text):
        return
    nodes = list(ast.walk(tree))
    constants = _constants(nodes)
    for node in nodes:
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.DictComp | ast.Call) and (made := _written_out(value, constants)) is not None:
                setattr(node, name, made)
            for index, part in enumerate(value if isinstance(value, list) else ()):
                if isinstance(part, ast.DictComp | ast.Call):
                    value[index] = _written_out(part, constants) or part
    for node in nodes:
        for block in parts_of(node):
            for index in range(len(block) - 1, -1, -1):
                part = block[index]
                if isinstance(part, ast.For) and (passes := _passes(part, constants)):
                    block[index : index + 1] = passes


def _constants(nodes: list[ast.AST]) -> dict[str, list[str]]:
    """The lists of names that a file assigns to a variable or an attribute once, by its last name."""
    assigned: dict[str, list[ast.expr | None]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            value = None if isinstance(node, ast.AugAssign) else node.value
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if key := key_of(target):
                    assigned.setdefault(last_name(key), []).append(value)
    # A method may change a list: `self.parts.append("scaler")`.
    changed = {
        last_name(key_of(n.func.value))
        for n in nodes
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and n.func.attr in {"append", "extend", "insert"}
    }
    single = {key: values[0] for key, values in assigned.items() if len(values) == 1 and key not in changed}
    return {key: names for key, value in single.items() if value is not None and (names := _strings(value))}


def _strings(node: ast.expr) -> list[str]:
    """The strings of a tuple, list or set; empty for anything else."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) and len(node.elts) <= MAX_NAMES else []
    names = [
        p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str) and p.value.isidentifier()
    ]
    return names if len(names) == len(parts) else []


def _names(node: ast.expr, constants: dict[str, list[str]]) -> list[str]:
    """The names that a loop is over."""
    return _strings(node) or constants.get(last_name(key_of(node)), [])


def _written_out(node: ast.DictComp | ast.Call, constants: dict[str, list[str]]) -> ast.expr | None:
    """A comprehension, or `dict` of pairs, as a dictionary; None if it is anything else."""
    value: ast.expr
    if isinstance(node, ast.DictComp):
        generators, key, value = node.generators, node.key, node.value
    else:
        pairs = node.args[0] if key_of(node.func) == "dict" and len(node.args) == 1 and not node.keywords else None
        pair = pairs.elt if isinstance(pairs, ast.GeneratorExp | ast.ListComp) else None
        if (
            not isinstance(pairs, ast.GeneratorExp | ast.ListComp)
            or not isinstance(pair, ast.Tuple)
            or len(pair.elts) != 2
        ):
            return None
        generators, (key, value) = pairs.generators, pair.elts
    if len(generators) != 1 or not isinstance(target := generators[0].target, ast.Name):
        return None
    names = _names(generators[0].iter, constants) if _is_about(value, target.id) else []
    keys: list[ast.expr | None] = [_with_name(key, target.id, name) for name in names]
    values = [_with_name(value, target.id, name) for name in names]
    return ast.copy_location(ast.Dict(keys, values), node) if names else None


def _passes(loop: ast.For, constants: dict[str, list[str]]) -> list[ast.AST]:
    """The statements of a loop for each name; empty if it is about anything else."""
    target = loop.target
    leaves = any(isinstance(n, ast.Break | ast.Continue) for n in ast.walk(loop))
    if not isinstance(target, ast.Name) or loop.orelse or leaves or not _is_about(loop, target.id):
        return []
    names = _names(loop.iter, constants)
    return [_with_name(statement, target.id, name) for name in names for statement in loop.body]


def _is_about(node: ast.AST, variable: str) -> bool:
    """Whether a part of the text saves or restores the state of an object that it gets by a name in a variable."""
    inside = list(ast.walk(node))
    has_state = any(isinstance(n, ast.Attribute) and n.attr in _STATES for n in inside)
    return has_state and any(isinstance(n, ast.expr) and _owner_of(n, variable) is not None for n in inside)


def _owner_of(node: ast.expr, variable: str) -> ast.expr | None:
    """The object of `getattr(object, name)` or `object.__dict__[name]`; None for anything else."""
    if isinstance(node, ast.Call) and key_of(node.func) == "getattr" and len(node.args) > 1:
        return node.args[0] if key_of(node.args[1]) == variable and key_of(node.args[0]) else None
    table = node.value if isinstance(node, ast.Subscript) and key_of(node.slice) == variable else None
    return table.value if isinstance(table, ast.Attribute) and table.attr == "__dict__" else None


def _with_name(node: _Node, variable: str, name: str) -> _Node:
    """A copy of a part of the text for one name."""
    replaced: _Node = _Name(variable, name).visit(copy.deepcopy(node))
    return replaced


class _Name(ast.NodeTransformer):
    """Puts one name in the place of a variable, and the attribute where that name is looked up."""

    def __init__(self, variable: str, name: str) -> None:
        self.variable, self.name = variable, name

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """A node with its parts replaced."""
        owner = _owner_of(node, self.variable) if isinstance(node, ast.expr) else None
        if owner is not None:
            return ast.copy_location(ast.Attribute(owner, self.name, ast.Load()), node)
        if isinstance(node, ast.Name) and node.id == self.variable and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant(self.name), node)
        return super().generic_visit(node)
