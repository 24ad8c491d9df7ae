"""Enums of a script in a run with chosen settings: members are objects with the properties and methods of their class.

`Precision("bf16")`, `Precision["BF16"]`, `Precision.BF16` and an element of `list(Precision)` are one member, which compares by
identity, or as its string where the enum derives from one.
"""

from __future__ import annotations

import ast
from typing import Any

from halfstep.check.simulation.simulation import Simulation
from halfstep.check.simulation.values import Class, Func, Instance, Library, Unknown, is_plain

__all__ = ["Enums", "is_enum"]

_ENUMS = {"Enum", "StrEnum", "IntEnum"}
_PLAIN = {"str", "int", "StrEnum", "IntEnum"}  # a member of an enum with such a base equals its value


def _last_names(cls: Class) -> set[str]:
    return {base.full.rpartition(".")[2] for base in cls.libraries() if isinstance(base, Library)}


def is_enum(value: Any) -> bool:
    """Whether a value is an enum that the script defines."""
    return isinstance(value, Class) and bool(_last_names(value) & _ENUMS)


def _is_member(value: Any) -> bool:
    return isinstance(value, Instance) and is_enum(value.cls)


def _as_value(value: Any) -> Any:
    """A member as what it equals: its string or number, if the enum derives from one."""
    return value.attributes["value"] if _is_member(value) and _last_names(value.cls) & _PLAIN else value


class Enums(Simulation):
    """Runs what a script does with its enums."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._members: dict[Class, dict[str, Instance]] = {}

    def members(self, cls: Class) -> dict[str, Instance]:
        """The members of an enum by name."""
        if cls not in self._members:
            names = [n for n, v in cls.attributes.items() if not n.startswith("_") and not isinstance(v, Func | Class)]
            self._members[cls] = {name: self._member(cls, name) for name in names}
        return self._members[cls]

    def _member(self, cls: Class, name: str) -> Instance:
        value = cls.attributes[name]
        member = Instance(cls, f"{cls.node.name}.{name}", {"name": name, "value": value}, is_built=True)
        constructor = cls.lookup("__init__")
        if isinstance(constructor, Func):
            args = list(value) if isinstance(value, tuple) else [value]
            function = Func(constructor.node, constructor.env, member, constructor.cls)
            self.call_function(function, args, {}, cls.node)
        return member

    def attribute(self, base: Any, name: str, node: ast.AST) -> Any:
        """A member by its name."""
        if is_enum(base) and name in (members := self.members(base)):
            return members[name]
        if _is_member(base) and name in (members := self.members(base.cls)) and name not in base.attributes:
            return members[name]
        return super().attribute(base, name, node)

    def sequence(self, value: Any) -> Any:
        """The members of an enum that is iterated over."""
        return list(self.members(value).values()) if is_enum(value) else super().sequence(value)

    def create(self, cls: Class, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """A member by its value."""
        if not is_enum(cls):
            return super().create(cls, args, kwargs, node)
        wanted = _as_value(args[0]) if args else None
        for member in self.members(cls).values():
            if member is wanted or (is_plain(wanted) and member.attributes["value"] == wanted):
                return member
        return Unknown(self.path.fresh(cls.node.name))

    def compared(self, left: Any, sign: ast.cmpop, right: Any) -> Any:
        """A comparison of members."""
        left, right = _as_value(left), _as_value(right)
        known = (_is_member(left) or is_plain(left)) and (_is_member(right) or is_plain(right))
        if (
            known
            and (_is_member(left) or _is_member(right))
            and isinstance(sign, ast.Eq | ast.NotEq | ast.Is | ast.IsNot)
        ):
            return (left is right) is isinstance(sign, ast.Eq | ast.Is)
        return super().compared(left, sign, right)

    def contains(self, container: Any, item: Any) -> Any:
        """Whether a member is among some."""
        container = self.sequence(container)
        if isinstance(container, list | tuple) and (_is_member(item) or any(map(_is_member, container))):
            parts = [_as_value(part) for part in container]
            item = _as_value(item)
            return any(part is item or (is_plain(part) and is_plain(item) and part == item) for part in parts)
        return super().contains(container, item)
