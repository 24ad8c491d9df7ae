"""What Python's own functions and containers give in a simulated run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from halfstep.check.simulation.decisions import Decisions
from halfstep.check.simulation.values import (
    Func,
    Instance,
    Negated,
    Params,
    Partial,
    Suspended,
    Tensor,
    Test,
    Unknown,
    combined,
    is_plain,
)

__all__ = ["Python"]

_TYPES: dict[str, type] = {each.__name__: each for each in (list, tuple, dict, str, int, float, bool)}
MAX_ELEMENTS = 8  # of a list that a loop runs through
_LEN = 4  # of what a loop runs through, if the text does not decide it


class Python(Decisions):
    """Calls Python's own."""

    def _builtin_range(self, args: list[Any], node: ast.AST) -> Any:
        is_collected = len(args) > 2 and isinstance(node, ast.Call) and "len(" in ast.unparse(node)
        if args and all(isinstance(a, int) for a in args) and not is_collected:
            try:
                return range(*args)
            except (TypeError, ValueError):
                return Unknown(self.path.fresh("range"))
        first = self.counter(args[0]) if len(args) > 1 else 0
        if isinstance(first, Unknown):  # as in range(start + 1, end)
            first = int(first.key.endswith("+ 1)"))
        # With steps of unknown width the end is not known: a list that the script fills has few elements here.
        return Partial("range", [first, args[min(len(args), 2) - 1] if args and len(args) < 3 else None], {})

    def _builtin_enumerate(self, args: list[Any], node: ast.AST) -> Any:
        start = args[1] if len(args) > 1 else 0
        if args and isinstance(args[0], list | tuple) and isinstance(start, int):
            return [(start + i, each) for i, each in enumerate(args[0])]
        return Partial("enumerate", [args[0] if args else None, start], {})

    def _builtin_len(self, args: list[Any], node: ast.AST) -> Any:
        value = args[0] if args else None
        if isinstance(value, list | tuple | dict | str):
            return len(value)
        if isinstance(value, Unknown) and value.key.startswith("batch#"):  # a tuple of two or three tensors
            return Unknown(f"len({value.key})")
        return _LEN if isinstance(value, Unknown) else Unknown(self.path.fresh("len"))

    def _builtin_zip(self, args: list[Any], node: ast.AST) -> Any:
        if args and all(isinstance(a, list | tuple) for a in args):
            return list(zip(*args, strict=False))
        if any(isinstance(a, Negated | Test | Tensor) for a in args) or not args:
            return Unknown(self.path.fresh("zip"))
        return Partial("zip", [self._from_start(a) for a in args], {})

    def _builtin_cycle(self, args: list[Any], node: ast.AST) -> Any:
        if not args or args[0] in ([], (), range(0)):
            return Unknown(self.path.fresh("cycle"))
        if (
            isinstance(args[0], Partial) and args[0].function == "range"
        ):  # where its end is unknown, so is where windows begin
            self.gradients.is_sure = False
        return Partial("cycle", [args[0], self._from_start(args[0])], {})

    def _from_start(self, value: Any) -> Any:
        """A value to take elements from, one after the other."""
        if isinstance(value, list | tuple | range):
            return Partial("items", [value, 0], {})
        return Partial(value.function, list(value.args), {}) if isinstance(value, Partial) else value

    def _builtin_isinstance(self, args: list[Any], node: ast.AST) -> Any:
        value = args[0] if args else None
        types = args[1] if len(args) > 1 and isinstance(args[1], tuple) else args[1:]
        names = {getattr(t, "full", "") for t in types}
        if names and names <= _TYPES.keys() and (is_plain(value) or isinstance(value, list | tuple | dict | Instance)):
            return isinstance(value, tuple(_TYPES[name] for name in names))
        key = value.key if isinstance(value, Unknown) else self.path.fresh("isinstance")
        return Unknown(f"isinstance({key}, {getattr(args[1], 'full', '?') if len(args) > 1 else ''})")

    def _builtin_hasattr(self, args: list[Any], node: ast.AST) -> Any:
        value, name = (args[0], args[1]) if len(args) > 1 else (None, "")
        if isinstance(value, Instance) and isinstance(name, str):
            if name in value.attributes or value.cls.lookup(name) is not ...:
                return True
            if not value.cls.libraries():
                return False
        return Unknown(f"hasattr({value.key if isinstance(value, Unknown) else self.path.fresh('object')}, {name!r})")

    def _builtin_getattr(self, args: list[Any], node: ast.AST) -> Any:
        if len(args) > 1 and isinstance(args[1], str):
            value, name = args[0], args[1]
            if isinstance(value, Instance) and name not in value.attributes and value.cls.lookup(name) is ...:
                return (
                    args[2] if len(args) > 2 and not value.cls.libraries() else Unknown(f"{value.cls.node.name}.{name}")
                )
            return self.attribute(value, name, node)
        return Unknown(self.path.fresh(f"{getattr(args[0], 'full', 'object')}.getattr" if args else "getattr"))

    def _builtin_setattr(self, args: list[Any], node: ast.AST) -> Any:
        if len(args) == 3 and isinstance(args[0], Instance) and isinstance(args[1], str):
            args[0].attributes[args[1]] = args[2]

    def _number(self, args: list[Any]) -> Any:
        value = args[0] if args else 0
        if isinstance(value, int | float | bool):
            return value
        return value if isinstance(value, Unknown | Test | Negated) else Unknown(self.path.fresh("number"))

    def _builtin_int(self, args: list[Any], node: ast.AST) -> Any:
        value = self._number(args)
        return int(value) if isinstance(value, float) and abs(value) < 1e9 else value

    def _builtin_float(self, args: list[Any], node: ast.AST) -> Any:
        return self._number(args)

    def _builtin_bool(self, args: list[Any], node: ast.AST) -> Any:
        value = args[0] if args else False
        return value if isinstance(value, Unknown | Test | Negated) else self.truth(value)

    def _builtin_str(self, args: list[Any], node: ast.AST) -> Any:
        value = args[0] if args else ""
        return (
            str(value) if is_plain(value) else value if isinstance(value, Unknown) else Unknown(self.path.fresh("str"))
        )

    def _largest(self, args: list[Any], choose: Any) -> Any:
        values = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        if values and all(isinstance(v, int | float) for v in values):
            return choose(values)
        others = [v for v in values if isinstance(v, Unknown)]
        if choose is max and len(values) == 2 and 1 in values and others:  # max(1, accumulate)
            return others[0]
        return combined(*values) if any(isinstance(v, Tensor) for v in values) else Unknown(self.path.fresh("extreme"))

    def _builtin_max(self, args: list[Any], node: ast.AST) -> Any:
        return self._largest(args, max)

    def _builtin_min(self, args: list[Any], node: ast.AST) -> Any:
        return self._largest(args, min)

    def _builtin_sum(self, args: list[Any], node: ast.AST) -> Any:
        values = args[0] if args else []
        values = self.collected(values) if isinstance(values, Suspended) else values
        if isinstance(values, list | tuple) and any(isinstance(v, Tensor) for v in values):
            return combined(*values)
        return values if isinstance(values, Params | Tensor) else Unknown(self.path.fresh("sum"))

    def _builtin_list(self, args: list[Any], node: ast.AST) -> Any:
        if not args:
            return []
        if isinstance(args[0], Suspended):
            return self.collected(args[0])
        return list(args[0]) if isinstance(args[0], list | tuple) else args[0]

    _builtin_tuple = _builtin_list

    _builtin_set = _builtin_list

    def _builtin_iter(self, args: list[Any], node: ast.AST) -> Any:
        return args[0] if args and isinstance(args[0], Suspended) else self._builtin_list(args, node)

    _builtin_sorted = _builtin_list

    _builtin_reversed = _builtin_list

    def _builtin_map(self, args: list[Any], node: ast.AST) -> Any:
        if len(args) != 2 or not isinstance(args[0], Func | Partial | Instance):
            return Unknown(self.path.fresh("map"))
        if isinstance(args[1], list | tuple):
            return [self.call(args[0], [each], {}, node) for each in args[1]]
        if self.relevance.acts(node):
            return [self.call(args[0], [each], {}, node) for each in self.elements(args[1], self.iterations(node))]
        return Unknown(self.path.fresh("map"))

    def _builtin_filter(self, args: list[Any], node: ast.AST) -> Any:
        return args[1] if len(args) > 1 else Unknown(self.path.fresh("filter"))

    def _builtin_next(self, args: list[Any], node: ast.AST) -> Any:
        if args and isinstance(args[0], Suspended) and self.relevance.trains(args[0].function.node):
            self.gradients.lose()  # a part of it runs here
        return args[0] if args and isinstance(args[0], Params) else Unknown(self.path.fresh("batch"))

    def _builtin_dict(self, args: list[Any], node: ast.AST) -> Any:
        if not args and not getattr(node, "keywords", ()):
            return {}
        return dict(args[0]) if args and isinstance(args[0], dict) else Unknown(self.path.fresh("dict"))

    def _builtin_print(self, args: list[Any], node: ast.AST) -> Any:
        return None

    def call_native(self, base: Any, name: str, args: list[Any]) -> Any:
        """What a method of a list, dictionary or string gives."""
        if isinstance(base, list):
            if name in {"append", "insert"} and args:
                base.insert(args[0] if len(args) > 1 and isinstance(args[0], int) else len(base), args[-1])
                return None
            if name == "extend" and args:
                base.extend(args[0] if isinstance(args[0], list | tuple) else args[:1])
                return None
        if isinstance(base, dict):
            if name == "get" and args:
                default = args[1] if len(args) > 1 else None
                return base.get(args[0], default) if is_plain(args[0]) else self.element(base, args[0])
            if name in {"items", "values", "keys"}:
                return [*map(tuple, base.items())] if name == "items" else list(getattr(base, name)())
            if name == "setdefault" and len(args) == 2 and is_plain(args[0]) and not isinstance(args[0], list):
                return base.setdefault(args[0], args[1])
            if name == "update" and args and isinstance(args[0], dict):
                base.update(args[0])
                return None
        if (
            isinstance(base, str)
            and name in {"lower", "upper", "strip", "startswith", "endswith", "split", "replace"}
            and all(map(is_plain, args))
        ):
            try:
                return getattr(base, name)(*args)
            except (TypeError, ValueError):
                return Unknown(self.path.fresh(name))
        return Unknown(self.path.fresh(name))

    def elements(self, value: Any, limit: int) -> Iterator[Any]:
        """What a loop over a value assigns, at most `limit` times unless the values are the script's own."""
        if isinstance(value, dict):
            value = list(value)
        if isinstance(value, Suspended):
            value = self.collected(value)
        if isinstance(value, list | tuple):
            yield from value[: max(limit, MAX_ELEMENTS)]
        elif isinstance(value, Params):
            yield from [value] * min(limit, 2)
        elif isinstance(value, range):
            yield from value[:limit]
        else:
            for _ in range(limit):
                if self._is_over(value):
                    return
                yield self._element(value)

    def _is_over(self, value: Any) -> bool:
        """Whether there are no more elements; the end of a range is known in a run that has asked for its last step."""
        if isinstance(value, Partial) and value.function == "zip":
            return any(map(self._is_over, value.args))
        if isinstance(value, Partial) and value.function == "items":
            return bool(value.args[1] >= len(value.args[0]))
        if not isinstance(value, Partial) or value.function != "range":
            return False
        end = self.resolved(value.args[1])
        return isinstance(end, int) and isinstance(value.args[0], int) and value.args[0] >= end

    def _element(self, value: Any) -> Any:
        if isinstance(value, Partial) and value.function == "enumerate":
            count = value.args[1]
            value.args[1] = count + 1 if isinstance(count, int) else count
            return (count, self._element(value.args[0]))
        if isinstance(value, Partial) and value.function == "zip":
            return tuple(map(self._element, value.args))
        if isinstance(value, Partial) and value.function == "items":
            value.args[1] += 1
            return value.args[0][value.args[1] - 1]
        if isinstance(value, Partial) and value.function == "cycle":
            if self._is_over(value.args[1]):
                value.args[1] = self._from_start(value.args[0])
            return self._element(value.args[1])
        if isinstance(value, Partial) and value.function == "range":
            first = value.args[0]
            if not isinstance(first, int):
                return Unknown(self.path.fresh("index"))
            value.args[0] = first + 1
            return first
        if isinstance(value, Params):
            return value
        return Unknown(self.path.fresh("batch"))
