"""Names, attributes, elements and tables of a simulated run."""

from __future__ import annotations

import ast
from typing import Any

from halfstep.check.simulation.decisions import Decisions
from halfstep.check.simulation.paths import Exhausted
from halfstep.check.simulation.values import (
    Class,
    Defaults,
    Env,
    Func,
    Instance,
    Library,
    Params,
    Super,
    Tensor,
    Test,
    Unknown,
    is_module,
    is_plain,
    unknown,
)

__all__ = ["Expressions"]

BUILTINS = {
    "range", "enumerate", "len", "zip", "int", "float", "str", "bool", "min", "max", "isinstance", "hasattr", "getattr", "print",
    "list", "dict", "tuple", "set", "sum", "super", "iter", "next", "any", "all", "abs", "round", "type", "exit", "quit", "object",
    "setattr", "sorted", "reversed", "map", "filter", "callable", "id", "open", "vars",
}  # fmt: skip  # fmt: skip
MAX_KEYS = 8  # of a table of formats
_WITHOUT_ATTRIBUTES = {"object", "torch.nn.Module", "torch.nn.modules.module.Module", "abc.ABC"}


_NOWHERE = ast.Pass()  # a call that the text does not have


_HANDLERS: dict[type, Any] = {}  # methods, by the type of the node


class Expressions(Decisions):
    """Evaluates expressions."""

    def value(self, node: ast.expr, env: Env) -> Any:
        """The value of an expression."""
        path = self.path
        path.steps -= 1  # as `step` does, which would be called for every expression
        if path.steps < 0:
            raise Exhausted
        kind = type(node)
        if kind is ast.Constant:
            return node.value  # type: ignore[attr-defined]
        if kind not in _HANDLERS:
            _HANDLERS[kind] = getattr(type(self), f"_value_{kind.__name__}", None)
        handler = _HANDLERS[kind]
        return self.resolved(handler(self, node, env) if handler is not None else Unknown(path.fresh(kind.__name__)))

    def _value_Name(self, node: ast.Name, env: Env) -> Any:
        scope: Env | None = env
        while scope is not None:
            if node.id in scope.variables:
                return scope.variables[node.id]
            if node.id in scope.local and node.id not in scope.of_parent:
                return unknown(node.id)  # not assigned yet on this path
            scope = scope.parent
        if node.id == "__name__":
            return "__main__"
        if node.id in BUILTINS:
            return Library(node.id)
        return Library(self.table[node.id]) if node.id in self.table else unknown(node.id)

    def _value_Attribute(self, node: ast.Attribute, env: Env) -> Any:
        return self.attribute(self.value(node.value, env), node.attr, node)

    def attribute(self, base: Any, name: str, node: ast.AST) -> Any:
        """An attribute of a value."""
        if isinstance(base, Library):
            return Library(f"{base.full}.{name}")
        if isinstance(base, Instance):
            return self._of_instance(base, name, node)
        if isinstance(base, Super):
            return self._bound(base.lookup(name), base.owner, node)
        if isinstance(base, Class):
            member = base.lookup(name)
            if isinstance(member, Func) and "classmethod" in _decorators(member):
                return Func(member.node, member.env, base, member.cls)
            return unknown(f"{base.node.name}.{name}") if member is ... else member
        if isinstance(base, str) and name == "type":  # of a device
            return str(base).partition(":")[0]
        if isinstance(base, Unknown):
            return unknown(base.key if name == "module" else f"{base.key}.{name}")
        if isinstance(base, Tensor):
            if name in {"loss", "data", "logits", "T"}:
                return base
            # What another file's function gave may be an object with settings, which stay as they are.
            return Unknown(self.path.fresh(name) if name == "grad" else f"{self.key_of(base)}.{name}")
        return Unknown(self.path.fresh(name))

    def _of_instance(self, base: Instance, name: str, node: ast.AST) -> Any:
        if name in base.attributes:
            return base.attributes[name]
        member = base.cls.lookup(name)
        if member is not ...:
            return self._bound(member, base, node)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            self._miss(base, name, node)
        if is_module(base.cls) and not base.is_built:  # a part of a model
            return unknown(f"{base.key}.{name}")
        return unknown(f"{base.cls.node.name}.{name}")

    def _bound(self, member: Any, owner: Instance, node: ast.AST) -> Any:
        """What an attribute of a class is for an object of it."""
        if not isinstance(member, Func):
            return Unknown(self.path.fresh("attribute")) if member is ... else member
        names = _decorators(member)
        if "staticmethod" in names:
            return member
        bound = Func(member.node, member.env, owner.cls if "classmethod" in names else owner, member.cls)
        return self.call(bound, [], {}, node) if names & {"property", "cached_property"} else bound

    def _miss(self, base: Instance, name: str, node: ast.Attribute) -> None:
        """An attribute that this run has not assigned: an error if only other runs create a scaler there."""
        libraries = [b for b in base.cls.libraries() if not (isinstance(b, Library) and b.full in _WITHOUT_ATTRIBUTES)]
        if libraries or not base.is_built:
            return
        created = [self.relevance.scaler_attributes(cls.node).get(name) for cls in base.cls.lineage()]
        place = next((c for c in created if c is not None), None)
        if place is not None:
            self.gradients.missing(f"self.{name}", node, place)

    def _value_Subscript(self, node: ast.Subscript, env: Env) -> Any:
        base = self.value(node.value, env)
        if isinstance(node.slice, ast.Slice):
            return base if isinstance(base, Tensor | Params) else Unknown(self.path.fresh("slice"))
        index = self.value(node.slice, env)
        if isinstance(base, dict | list | tuple | str):
            return self.element(base, index)
        if isinstance(base, Class) and isinstance(index, str):  # of an enum
            return self.attribute(base, index, node)
        if isinstance(base, Unknown | Library) and is_plain(index):
            return self.foreign_element(base, index)
        return base if isinstance(base, Tensor | Params) else Unknown(self.path.fresh("element"))

    def foreign_element(self, base: Unknown | Library, index: Any) -> Any:
        """An element of a container of another file."""
        if isinstance(base, Library):
            return Unknown(self.path.fresh("element"))
        return unknown(f"{base.key}.{index if isinstance(index, str) else repr(index)}")

    def element(self, base: dict[Any, Any] | list[Any] | tuple[Any, ...] | str, index: Any) -> Any:
        """An element of a container of the script's own; under a key that is not known, a run decides for one of them."""
        if is_plain(index) or (
            isinstance(base, dict) and isinstance(index, Unknown | Library | Instance) and index in base
        ):
            try:
                if isinstance(base, Defaults) and index not in base:
                    base[index] = self.call(base.factory, [], {}, _NOWHERE)
                return base[index]
            except (LookupError, TypeError):
                return Unknown(self.path.fresh("element"))
        if isinstance(base, dict) and isinstance(index, Unknown) and is_plain(list(base)) and len(base) <= MAX_KEYS:
            for key in base:
                if self.truth(Test(index.key, "==", key), 1):
                    return base[key]
        return Unknown(self.path.fresh("element"))

    def _value_Tuple(self, node: ast.Tuple, env: Env) -> Any:
        return tuple(self.value(e, env) for e in node.elts)

    def _value_List(self, node: ast.List | ast.Set, env: Env) -> Any:
        return [self.value(e, env) for e in node.elts]

    _value_Set = _value_List

    def _value_Starred(self, node: ast.Starred, env: Env) -> Any:
        return self.value(node.value, env)

    def _value_Dict(self, node: ast.Dict, env: Env) -> Any:
        table: dict[Any, Any] = {}
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            value = self.value(value_node, env)
            key = self.value(key_node, env) if key_node is not None else None
            if key_node is None and isinstance(value, dict):
                table |= value
            elif isinstance(key, str | int | float | bool | bytes | Library | Instance):
                table[key] = value
        return table

    def _value_JoinedStr(self, node: ast.JoinedStr, env: Env) -> Any:
        parts = [self.value(p.value if isinstance(p, ast.FormattedValue) else p, env) for p in node.values]
        is_known = all(isinstance(p, str | int) for p in parts) and not any(
            isinstance(p, ast.FormattedValue) and p.format_spec for p in node.values
        )
        return "".join(map(str, parts)) if is_known else Unknown(self.path.fresh("text"))

    def _value_Lambda(self, node: ast.Lambda, env: Env) -> Any:
        return Func(node, env)

    def _value_NamedExpr(self, node: ast.NamedExpr, env: Env) -> Any:
        value = self.value(node.value, env)
        self.assign(node.target, value, env)
        return value

    def _value_Await(self, node: ast.Await, env: Env) -> Any:
        return self.value(node.value, env)

    def _value_IfExp(self, node: ast.IfExp, env: Env) -> Any:
        return self.value(node.body if self.truth(self.value(node.test, env)) else node.orelse, env)


def _decorators(function: Func) -> set[str]:
    """The last names of a function's decorators."""
    return {ast.unparse(d).rpartition(".")[2] for d in getattr(function.node, "decorator_list", ())}
