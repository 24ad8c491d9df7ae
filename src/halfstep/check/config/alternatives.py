"""The literals that an expression of a script may be: the arms of a ternary, a default of the command line or of a field.

A default is what most runs use, so a mistake in it is a mistake. Nothing is returned for a variable that the script also
sets to something that is not a literal.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cached_property

from halfstep.check.script.syntax.names import chain, key_of

__all__ = ["Alternatives"]

_MAX_DEPTH = 5
_CONVERTS = frozenset({"int", "str"})
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


class Alternatives:
    """The bindings of one script, by the last name of what is bound."""

    def __init__(self, nodes: Sequence[ast.AST]) -> None:
        self.nodes = nodes
        self.functions = [n for n in nodes if isinstance(n, AnyFunction)]  # outer ones first
        self.values: dict[str, list[tuple[str, ast.expr | None]]] = {}  # last name -> (variable, its value)
        self.items: dict[str, list[ast.expr]] = {}  # a part of a variable, `options["precision"]` -> its values
        self.calls: dict[str, list[ast.Call]] = {}  # of a function by its name
        self.options: dict[str, list[ast.expr]] = {}  # of an argparse or click parser: name -> default
        self.choices: dict[str, list[ast.expr]] = {}  # of a parser: name -> the values that it accepts
        self.fields: dict[str, list[ast.expr]] = {}  # of a class: name -> default
        self.members: dict[str, dict[str, ast.Constant]] = {}  # of an enum of strings: its values by their names
        self.annotations: dict[
            str, set[str]
        ] = {}  # of a variable, a parameter or a field: the classes by its last name
        self._asked: set[ast.expr] = set()  # values that `_is_known` is looking at
        for node in nodes:
            self._read(node)

    def _read(self, node: ast.AST) -> None:
        if isinstance(node, (ast.AnnAssign, ast.arg)) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else "".join(chain(node.target)[-1:])
            written = node.annotation.value if isinstance(node.annotation, ast.Constant) else key_of(node.annotation)
            self.annotations.setdefault(name, set()).add(str(written))
        if isinstance(node, ast.Assign):
            for bound in node.targets:
                self._bind(bound, node.value)
                if isinstance(bound, ast.Subscript) and key_of(bound):
                    self.items.setdefault(key_of(bound), []).append(node.value)
                self._fill(key_of(bound), node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._bind(node.target, node.value)
            self._fill(key_of(node.target), node.value)
        elif isinstance(node, (ast.AugAssign, ast.For)):
            self._bind(node.target, None)
        elif isinstance(node, ast.ClassDef):
            if any(chain(base)[-1:] in {("Enum",), ("StrEnum",)} for base in node.bases):
                self.members[node.name] = _members(node)
            for statement in node.body:
                target: ast.expr | None = statement.target if isinstance(statement, ast.AnnAssign) else None
                if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                    target = statement.targets[0]
                value = statement.value if isinstance(statement, (ast.AnnAssign, ast.Assign)) else None
                if isinstance(target, ast.Name) and value is not None:
                    self.fields.setdefault(target.id, []).append(_field_default(value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            self._option(node, node.func.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            self.calls.setdefault(node.func.id, []).append(node)

    def _fill(self, name: str, value: ast.expr) -> None:
        """Read what a dictionary has when it is created, also in the dictionaries inside it."""
        for key, part in _entries(value) if name else ():
            self.items.setdefault(f"{name}[{key!r}]", []).append(part)
            self._fill(f"{name}[{key!r}]", part)

    def _option(self, call: ast.Call, method: str) -> None:
        keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if method == "set_defaults":
            for name, value in keywords.items():
                self.options.setdefault(name, []).append(value)
        if method not in {"add_argument", "option"}:
            return
        flags = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        dest = keywords.get("dest")
        long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
        name = str(dest.value) if isinstance(dest, ast.Constant) else long.lstrip("-").replace("-", "_")
        name = name.rpartition(".")[2]
        if "default" in keywords:
            self.options.setdefault(name, []).append(keywords["default"])
        if isinstance(accepted := keywords.get("choices"), (ast.List, ast.Tuple)):
            self.choices.setdefault(name, []).extend(accepted.elts)

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for item in target.elts:
                self._bind(item, None)
            return
        names = chain(target)
        if names:
            self.values.setdefault(names[-1], []).append((".".join(names), value))

    def untested(self, node: ast.expr) -> Iterator[ast.Constant]:
        """The literals that an expression may be, except those from elsewhere that the script compares something with.

        `"no" if args.precision == "fp32" else args.precision` is never "fp32".
        """
        inside = set(ast.walk(node))
        yield from (c for c in self.of(node) if c in inside or c.value not in self._tested)

    def offered(self, node: ast.expr) -> Iterator[ast.Constant]:
        """The other strings that the script is written for: choices of an option, and tests below a place that uses it as it is."""
        key, last = key_of(node), key_of(node).rpartition(".")[2]
        if not key or any(name == key for name, _ in self.values.get(last, ())):
            return
        choices = self.choices.get(last, ()) if isinstance(node, ast.Attribute) else ()
        for choice in choices:
            if isinstance(choice, ast.Constant) and isinstance(choice.value, str) and choice.value not in self._tested:
                yield choice
        for test, name, value in self._tests if not choices else ():  # the parser rejects what is none of them
            if name == key and test.lineno > node.lineno and not isinstance(test.body[-1], (ast.Raise, ast.Return)):
                yield value

    @cached_property
    def _tests(self) -> list[tuple[ast.If, str, ast.Constant]]:
        """`if setting == "value":` in chains of which no branch is for all other values."""
        ifs = [n for n in self.nodes if isinstance(n, ast.If)]
        chains = {n: n.orelse[0] for n in ifs if len(n.orelse) == 1 and isinstance(n.orelse[0], ast.If)}
        closed: set[ast.AST] = {n for n in ifs if n.orelse and n not in chains}
        closed -= {n for n in ifs if n.orelse and isinstance(n.orelse[-1], ast.Raise)}
        for test in reversed(ifs):  # inner ones are last
            if test in chains and chains[test] in closed:
                closed.add(test)
        tests = []
        for test in ifs:
            compared = test.test if isinstance(test.test, ast.Compare) and test not in closed else None
            value = compared.comparators[0] if compared is not None and len(compared.ops) == 1 else None
            is_string = isinstance(value, ast.Constant) and isinstance(value.value, str)
            if compared is not None and isinstance(value, ast.Constant) and is_string:
                tests += [(test, key_of(compared.left), value)] if isinstance(compared.ops[0], ast.Eq) else []
        return tests

    @cached_property
    def _tested(self) -> set[object]:
        compares = [n for n in self.nodes if isinstance(n, ast.Compare)]
        sides = [side for n in compares for part in (n.left, *n.comparators) for side in ast.walk(part)]
        return {side.value for side in sides if isinstance(side, ast.Constant) and isinstance(side.value, str)}

    def of(self, node: ast.expr, depth: int = 0) -> Iterator[ast.Constant]:
        """The literals that an expression may be, each once."""
        if depth > _MAX_DEPTH:
            return
        if isinstance(node, ast.Constant):
            yield node
        elif isinstance(node, ast.IfExp):
            yield from self.of(node.body, depth + 1)
            yield from self.of(node.orelse, depth + 1)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            for value in node.values:
                yield from (c for c in self.of(value, depth + 1) if c.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CONVERTS:
            yield from self.of(node.args[0], depth + 1) if len(node.args) == 1 else ()
        elif isinstance(node, ast.Call) and (default := _fallback(node)) is not None:
            for value in self.items.get(_item_of(node), ()) or (default,):
                yield from self.of(value, depth + 1)
        elif isinstance(node, ast.Attribute) and node.attr == "value" and (members := self._enum_of(node.value)):
            yield from members
        elif isinstance(node, (ast.Name, ast.Attribute)):
            for value in self._bound(node):
                yield from self.of(value, depth + 1)
        elif isinstance(node, ast.Subscript):
            for value in self.items.get(key_of(node), ()) or self._entries_of(node):
                yield from self.of(value, depth + 1)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            for value in self._returned(node.func.id):
                yield from self.of(value, depth + 1)

    def _enum_of(self, node: ast.expr) -> list[ast.Constant]:
        """The values of the enum that an object is a member of, by its annotation or its creation; not of members that a test names."""
        names = self.annotations.get("".join(chain(node)[-1:]), set())
        created = node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Subscript) else None
        name = key_of(created) if created is not None else next(iter(names)) if len(names) == 1 else ""
        tests = [part for n in self.nodes if isinstance(n, ast.Compare) for part in (n.left, *n.comparators)]
        tested = {key_of(part) for test in tests for part in ast.walk(test)} if name in self.members else set()
        return [value for key, value in self.members.get(name, {}).items() if f"{name}.{key}" not in tested]

    def _entries_of(self, node: ast.Subscript) -> list[ast.expr]:
        """The entries of a table of the script, `TABLE[mode]`, of which any may be chosen: all have a string as their value."""
        key = key_of(node.value)
        tables = [value for name, value in self.values.get(key.rpartition(".")[2], ()) if name == key]
        table = node.value if isinstance(node.value, ast.Dict) else tables[0] if len(tables) == 1 else None
        if not isinstance(table, ast.Dict) or isinstance(node.slice, ast.Constant):
            return []
        is_text = all(isinstance(v, ast.Constant) and isinstance(v.value, str) for v in table.values)
        return table.values if is_text else []

    def _returned(self, name: str) -> Iterator[ast.expr]:
        """What a function of the script returns, if it is the only one of its name."""
        named = [f for f in self.functions if f.name == name]
        for node in ast.walk(named[0]) if len(named) == 1 else ():
            if isinstance(node, ast.Return) and isinstance(node.value, (ast.Constant, ast.IfExp)):
                yield node.value

    def _bound(self, node: ast.Name | ast.Attribute) -> Iterator[ast.expr]:
        """The values of a variable, a parameter's default, an option's or a field's."""
        key = key_of(node)
        last = node.attr if isinstance(node, ast.Attribute) else node.id
        assigned = [(name, value) for name, value in self.values.get(last, ()) if name == key]
        if isinstance(node, ast.Name):
            parameter = self._parameter(node)
            if parameter is not None:
                option = self.options.get(last, ()) if not parameter and self._has_decorator(node) else ()
                if not self._inside(node, assigned):
                    yield from [*(parameter or option), *self._passed(node)]
                return
            assigned = [(name, value) for name, value in assigned if self._visible(node, value)]
        values = [value for _, value in assigned]
        # One of them is not a literal: what it is then depends on the others (`precision = f"{precision}-mixed"`).
        if len(values) > 1 and not all(value is not None and self._is_known(value) for value in values):
            return
        yield from (value for value in values if value is not None)
        if isinstance(node, ast.Attribute) and not values:
            options = self.options.get(last, ())
            fields = self.fields.get(last, ())
            yield from options if len(options) == 1 else fields if len(fields) == 1 and not options else ()

    def _is_known(self, value: ast.expr) -> bool:
        """Whether an expression is a literal, or a variable that is; not one that is bound to itself by way of others."""
        if value in self._asked:
            return False
        self._asked.add(value)
        try:
            return any(True for _ in self.of(value, _MAX_DEPTH - 1))
        finally:
            self._asked.discard(value)

    def _parameter(self, node: ast.Name) -> list[ast.expr] | None:
        """The default of the parameter that a name is, empty if it has none; None if it is no parameter."""
        for function in reversed(self.functions):
            if not function.lineno <= node.lineno <= (function.end_lineno or 0):
                continue
            args = function.args
            positional = [*args.posonlyargs, *args.args]
            defaults = dict(zip([a.arg for a in positional][::-1], args.defaults[::-1], strict=False))
            defaults |= {a.arg: d for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is not None}
            if any(a.arg == node.id for a in (*positional, *args.kwonlyargs)):
                return [defaults[node.id]] if node.id in defaults else []
        return None

    def _passed(self, node: ast.Name) -> Iterator[ast.expr]:
        """What calls in the script pass for the parameter that a name is."""
        function = self._function(node.lineno)
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)] if function is not None else []
        for call in self.calls.get(function.name, ()) if function is not None else ():
            yield from (k.value for k in call.keywords if k.arg == node.id)
            index = names.index(node.id) if node.id in names else len(call.args)
            if index < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args):
                yield call.args[index]

    def _function(self, line: int) -> AnyFunction | None:
        return next((f for f in reversed(self.functions) if f.lineno <= line <= (f.end_lineno or 0)), None)

    def _has_decorator(self, node: ast.Name) -> bool:
        """Whether the function of a parameter has decorators, such as click's options."""
        function = self._function(node.lineno)
        return function is not None and bool(function.decorator_list)

    def _inside(self, node: ast.Name, assigned: list[tuple[str, ast.expr | None]]) -> bool:
        """Whether the function of a parameter assigns to it, before or after."""
        function = self._function(node.lineno)
        return any(v is None or self._function(v.lineno) is function for _, v in assigned)

    def _visible(self, node: ast.Name, value: ast.expr | None) -> bool:
        """Whether a binding is in the function of `node` or around it."""
        function = self._function(value.lineno) if value is not None else None
        return function is None or function.lineno <= node.lineno <= (function.end_lineno or 0)


def _fallback(call: ast.Call) -> ast.expr | None:
    """The default of `options.get("precision", 16)`, `getattr(args, "precision", 16)` and `os.getenv("PRECISION", "16")`."""
    names = chain(call.func)
    last = names[-1] if names else call.func.attr if isinstance(call.func, ast.Attribute) else ""
    count = {"get": 2, "getenv": 2, "getattr": 3}.get(last, 0)
    return call.args[-1] if count and len(call.args) == count else None


def _item_of(call: ast.Call) -> str:
    """The part of a dictionary that `options.get("precision", 16)` reads, as `options["precision"]` is keyed; else ""."""
    name = key_of(call.func.value) if isinstance(call.func, ast.Attribute) and call.func.attr == "get" else ""
    key = call.args[0]
    return f"{name}[{key.value!r}]" if name and isinstance(key, ast.Constant) else ""


def _entries(node: ast.expr) -> Iterator[tuple[object, ast.expr]]:
    """The keys and values of a dictionary written out: `{"precision": 16}` or `dict(precision=16)`."""
    if isinstance(node, ast.Dict):
        yield from ((k.value, v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        yield from ((k.arg, k.value) for k in node.keywords if k.arg is not None)


def _field_default(value: ast.expr) -> ast.expr:
    """The default of a dataclass or pydantic field, `field(default=16)`, or the value itself."""
    if isinstance(value, ast.Call) and chain(value.func)[-1:] in {("field",), ("Field",), ("Option",)}:
        default = next((k.value for k in value.keywords if k.arg == "default"), None)
        return default or (value.args[0] if value.args else value)
    return value


def _members(node: ast.ClassDef) -> dict[str, ast.Constant]:
    """The strings of an enum by their names."""
    parts = [n for n in node.body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)]
    return {
        n.targets[0].id: n.value
        for n in parts
        if isinstance(n.targets[0], ast.Name) and isinstance(n.value, ast.Constant) and isinstance(n.value.value, str)
    }
