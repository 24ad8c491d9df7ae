"""Whether the file can save or restore the state of one object, by every place that names it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["LOADS", "SAVES", "Uses"]

SAVES, LOADS = "state_dict", "load_state_dict"
MAX_DEPTH = 4  # functions that pass the object on
_TESTS = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.If, ast.IfExp, ast.While, ast.Assert, ast.FormattedValue)
# Calls that neither save nor restore what they receive, next to the schedules of an optimizer.
_KNOWN = {"print", "isinstance", "bool", "id", "type", "hasattr", "step", "unscale_", "compile"}
_SCHEDULES = ("LR", "Scheduler", "WarmRestarts")


@dataclass(frozen=True, eq=False)
class Uses:
    """The places of a script that name an object: a variable, an attribute of `self` or an entry with a literal key."""

    script: Script

    @cached_property
    def _loads(self) -> dict[str, list[ast.expr]]:
        """The names, attributes and entries that the script reads, by the last part of their text."""
        loads: dict[str, list[ast.expr]] = {}
        for node in all_nodes(self.script.tree):
            if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load):
                key = key_of(node)
                if key:
                    loads.setdefault(last_name(key), []).append(node)
        return loads

    @cached_property
    def by_name(self) -> bool:
        """Whether the script reads attributes by names that no literal shows: `vars(self)`, `getattr(self, name)` of a parameter."""
        calls, strings = self.script.outline.calls, "__dict__" in self.script.source.text
        return (
            strings or bool(calls.keys() & {"vars", "locals", "globals"}) or not all(map(self._is_listed, self._read))
        )

    @property
    def _read(self) -> list[ast.Call]:
        return [call for call, _ in self.script.outline.calls.get("getattr", ())]

    def _is_listed(self, call: ast.Call) -> bool:
        """Whether the name that a `getattr` reads is a literal, or one of a literal collection that a loop goes through."""
        name = call.args[1] if len(call.args) > 1 else None
        if isinstance(name, ast.Constant):
            return True
        if self.script.outline.names.full(call.args[0]) if call.args else True:
            return True  # of a module: `getattr(torch, name)`
        for part in self.script.above(call):
            loops = getattr(part, "generators", [part] if isinstance(part, ast.For) else [])
            for loop in loops:
                is_target = isinstance(name, ast.Name) and key_of(loop.target) == name.id
                if is_target and isinstance(loop.iter, ast.Tuple | ast.List | ast.Set):
                    return True
        return False

    def may(self, method: str, key: str) -> bool:
        """Whether the script may call a method of an object, `state_dict` or `load_state_dict`, or leaves that open."""
        is_named = "getattr" in self.script.outline.calls and last_name(key) in self.script.outline.strings
        return is_named or self.by_name or self._may(method, key, None, MAX_DEPTH)

    def _may(self, method: str, key: str, function: Function | None, depth: int) -> bool:
        nodes = self._loads.get(last_name(key), [])
        if function is not None:
            inside = set(ast.walk(function.node))
            nodes = [n for n in nodes if n in inside and isinstance(n, ast.Name)]
        if "[" in key:
            # The whole collection is used in another way than by a literal key.
            whole = key.partition("[")[0]
            if any(not self._is_entry(n) for n in self._loads.get(last_name(whole), [])):
                return True
        return depth == 0 or any(self._leads_to(method, node, depth) for node in nodes)

    def _is_entry(self, node: ast.expr) -> bool:
        parent = self.script.outline.parents.get(node)
        is_entry = isinstance(parent, ast.Subscript) and parent.value is node
        return is_entry and isinstance(getattr(parent, "slice", None), ast.Constant)

    def _leads_to(self, method: str, node: ast.expr, depth: int) -> bool:
        """Whether one use of an object is a call of the method, or one that hides what happens to the object."""
        parents = self.script.outline.parents
        parent = parents.get(node)
        if isinstance(parent, ast.Attribute):
            return parent.attr == method or not isinstance(parents.get(parent), ast.Call)
        if isinstance(parent, ast.keyword):
            parent = parents.get(parent)
        if isinstance(parent, ast.Call) and parent.func is not node:
            passed = list(self._parameters(parent, node))
            name = last_name(key_of(parent.func))
            if not passed and (name in _KNOWN or name.endswith(_SCHEDULES)):
                return False
            return not passed or any(self._may(method, name, f, depth - 1) for name, f in passed)
        is_test = isinstance(parent, _TESTS) and not (isinstance(parent, ast.IfExp) and node is not parent.test)
        return not is_test

    def _parameters(self, call: ast.Call, value: ast.expr) -> Iterator[tuple[str, Function]]:
        """The parameter of a function of this file that a call passes an object for."""
        outline = self.script.outline
        caller = next((f for c, f in outline.calls.get(last_name(key_of(call.func)), ()) if c is call), None)
        target = outline.call_target(call, caller) if caller is not None else None
        if target is None:
            return
        params = target.params[1:] if target.method else target.params
        pairs = [*zip(params, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
        yield from ((name, target) for name, passed in pairs if passed is value and name in target.params)
