"""The outline of a script: its functions, assignments and calls, looked up by name; `visit` collects them.

Python has no declarations, so what `scaler` is follows from its assignments. Scopes are resolved as Python does (the
function, those around it, the module), with one addition: a parameter that nothing in the file binds is assumed to be
what the same name is bound to elsewhere in the file, because in nearly all training code `main` creates `scaler` and
passes it to `train(model, scaler)` under the same name.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from halfstep.check.script.syntax.children import blocks_of, statements_in
from halfstep.check.script.syntax.names import Names, key_of
from halfstep.check.script.syntax.scope import Binding, CallSite, Choice, Function, StatementCall

__all__ = ["Binding", "Function", "Outline", "last_name_of"]

MAX_CLASSES = 4  # of one object: each is followed
MAX_BINDINGS = 50  # of one variable: more are a generated table


@dataclass(eq=False)
class Outline:
    """What one walk over a script collects."""

    module: Function
    names: Names = field(default_factory=Names)
    functions: list[Function] = field(default_factory=list)
    classes: dict[str, dict[str, Function]] = field(default_factory=dict)
    bases: dict[str, tuple[ast.expr, ...]] = field(default_factory=dict)
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    calls: dict[str, list[CallSite]] = field(default_factory=dict)  # by last name
    loads: Counter[str] = field(default_factory=Counter)  # how often each last name is read
    variables: set[str] = field(default_factory=set)  # the names among them that are no attributes
    divisors: set[str] = field(default_factory=set)  # texts of what is divided by
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    strings: set[str] = field(default_factory=set)  # short string constants
    statement_calls: dict[ast.AST, list[StatementCall]] = field(default_factory=dict)  # in the order they run
    scaling: set[ast.AST] = field(default_factory=set)  # statements with "scale" in a name
    unread: set[ast.AST] = field(default_factory=set)  # functions that were not walked, because they cannot matter
    repeats_keyword: bool = False  # whether a call may pass a keyword argument twice

    @cached_property
    def library_calls(self) -> dict[str, list[CallSite]]:
        """The calls of imported names, by full name."""
        by_name: dict[str, list[CallSite]] = {}
        for sites in self.calls.values():
            for site in sites:
                full = self.names.full(site.call.func)
                if full:
                    by_name.setdefault(full, []).append(site)
        return by_name

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The ancestors of a node, innermost first, up to its function or the module."""
        parent = self.parents.get(node)
        while parent is not None:
            yield parent
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return
            parent = self.parents.get(parent)

    def lookup(self, key: str, function: Function) -> list[Binding]:
        """The assignments that may bind `key` inside `function`."""
        if "." in key or "[" in key:
            return self._attribute(key, function)
        every = self.bindings.get(key, [])
        scope: Function | None = function
        while scope is not None:
            here = self.by_function(key).get(scope.node)
            if here:
                return here
            if key in scope.params:
                break  # the caller decides: use the same name elsewhere in the file
            scope = scope.parent
        return every

    def by_function(self, key: str) -> dict[ast.AST, list[Binding]]:
        """The assignments to a variable by the function, or module, they are in."""
        if key not in self._locals:
            by_function: dict[ast.AST, list[Binding]] = {}
            for binding in self.bindings.get(key, ()):
                by_function.setdefault(binding.function.node, []).append(binding)
            self._locals[key] = by_function
        return self._locals[key]

    def _attribute(self, key: str, function: Function) -> list[Binding]:
        exact = self.bindings.get(key, [])
        if key.startswith("self."):
            own = [b for b in exact if b.function.cls == function.cls]
            if own:
                return own
        if exact:
            return exact
        return self._by_last_name.get(key.rsplit(".", 1)[-1], [])

    @cached_property
    def _by_last_name(self) -> dict[str, list[Binding]]:
        """The assignments to attributes, by what follows the last dot."""
        by_name: dict[str, list[Binding]] = {}
        for key, bindings in self.bindings.items():
            if "." in key:
                by_name.setdefault(key.rsplit(".", 1)[-1], []).extend(bindings)
        return by_name

    def values(self, key: str, function: Function) -> list[ast.expr]:
        """The expressions `key` may be, with plain copies of other variables followed."""
        return [value for value, _ in self.sources(key, function)]

    def sources(self, key: str, function: Function) -> list[tuple[ast.expr, Function]]:
        """The expressions `key` may be, each with the function that contains it."""
        known = self._values.get((key, function))
        if known is not None:
            return known
        values: list[tuple[ast.expr, Function]] = []
        visited = {(key, function)}
        pending = [(key, function)]
        while pending:
            name, scope = pending.pop()
            for value, origin in self._assigned(name, scope):
                copied = key_of(value)
                if copied and (copied, origin) not in visited and self._bound(copied, origin):
                    visited.add((copied, origin))
                    pending.append((copied, origin))
                elif (copied, origin) not in visited:
                    values.append((value, origin))
        self._values[key, function] = values
        return values

    def _bound(self, key: str, function: Function) -> bool:
        return next(self._assigned(key, function), None) is not None

    def _assigned(self, key: str, function: Function) -> Iterator[tuple[ast.expr, Function]]:
        """What is assigned to a variable, or passed for a parameter, each with the function that contains it."""
        bindings = self.lookup(key, function)
        if not bindings and key in function.params:
            yield from self.passed(key, function)
        for binding in bindings[:MAX_BINDINGS]:
            value = binding.value
            if value is not None and binding.index is not None:
                yield from self._unpacked(value, binding.index, binding.function)
            elif value is not None:
                yield value, binding.function

    def _unpacked(self, value: ast.expr, index: int, function: Function) -> Iterator[tuple[ast.expr, Function]]:
        """One of several values: of a tuple, or of the tuples that a function of this file always returns."""
        element = _element(value, index)
        if element is not None:
            yield element, function
            return
        target = self._named(value.func, function) if isinstance(value, ast.Call) else None
        if target is not None and target.name != "__init__":
            returned = [n.value for n in statements_in(target.node) if isinstance(n, ast.Return)]
            elements = [_element(v, index) if v is not None else None for v in returned]
            if None not in elements:
                yield from ((element, target) for element in elements if element is not None)

    def passed(self, param: str, function: Function) -> Iterator[tuple[ast.expr, Function]]:
        """What the calls in this file pass for a parameter, each with the calling function."""
        position = function.params.index(param) - (function.method and function.params[0] in {"self", "cls"})
        # `Trainer(cfg)` runs `Trainer.__init__(self, cfg)`.
        for call, caller in self.calls.get(function.cls if function.name == "__init__" else function.name, ()):
            by_name = [k.value for k in call.keywords if k.arg == param]
            by_position = call.args[position : position + 1]
            if (by_name or by_position) and self._named(call.func, caller) is function:
                yield (by_name or by_position)[0], caller

    def call_target(self, call: ast.Call, function: Function) -> Function | None:
        """The function of this file that a call runs, if the text decides it."""
        func = call.func
        name = last_name_of(func)
        if not (
            name in self._by_name or name in self.classes or "__call__" in self._by_name
        ):  # most calls leave the file
            return None
        target = self._named(func, function)
        if target is None and isinstance(func, ast.Attribute):
            target = self._method_of(key_of(func.value), func.attr, function)
        if target is None:
            target = self._method_of(key_of(func), "__call__", function)
        return target

    def _method_of(self, owner: str, name: str, function: Function) -> Function | None:
        """The method of an object that is created from one class of this file."""
        if name not in self._by_name:
            return None  # no class of this file has such a method
        is_variable = owner.isidentifier() or (owner.startswith("self.") and owner in self.bindings)
        sources = self.sources(owner, function) if is_variable else ()
        classes = {made for value, origin in sources for made in self._makers(value, origin)} - {None}
        # Of two classes, such as a scaler and its replacement, neither is certain; one that is also imported is one.
        cls = classes.pop() if len(classes) == 1 else None
        return self._method(cls, name) if cls in self.classes and cls not in self.names.table else None

    def _makers(self, value: ast.expr, function: Function) -> set[str | None]:
        """The names that are called to create a value; of `policy or Policy()` also those of what this file passes for `policy`."""
        options = [value]
        if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.Or):
            options = value.values
        elif isinstance(value, ast.IfExp):
            options = [value.body, value.orelse]
        default = next((o for o in options if _maker(o)), None)
        if default is None or len(options) != 2:
            return {_maker(value)}
        other = options[0] if default is options[1] else options[1]
        if key_of(other) not in function.params:
            return {_maker(value)}
        return {_maker(default), *(_maker(passed) for passed in self.values(key_of(other), function))}

    def possible_targets(self, call: ast.Call, function: Function) -> list[Function]:
        """The methods that a call may run on an object that is created from one of several classes of this file."""
        owner = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        values = self.values(owner, function) if owner else []
        options = [o for v in values for o in ((v.body, v.orelse) if isinstance(v, ast.IfExp) else (v,))]
        classes = dict.fromkeys(map(_maker, options))
        methods = [self._method(cls, last_name_of(call.func)) for cls in classes if cls and cls not in self.names.table]
        is_certain = 1 < len(methods) <= MAX_CLASSES and len(methods) == len(classes.keys() - {None})
        return [m for m in methods if m is not None] if is_certain and None not in methods else []

    def chosen_targets(self, call: ast.Call, function: Function) -> list[tuple[Function, tuple[Choice, ...]]]:
        """The functions of this file that a call through a variable may run: `step = amp_step if amp else plain_step`."""
        key = key_of(call.func)
        is_bound = key in self.bindings and (key.isidentifier() or key.startswith("self."))
        values = self.values(key, function) if is_bound else []
        if len(values) != 1:
            return []
        value = values[0]
        options: list[tuple[ast.expr, tuple[Choice, ...]]] = [(value, ())]
        if isinstance(value, ast.IfExp):
            options = [(value.body, (Choice(value.test, True),)), (value.orelse, (Choice(value.test, False),))]
        targets = [(self._named(option, function), choices) for option, choices in options]
        return [(target, choices) for target, choices in targets if target is not None]

    def passed_target(self, call: ast.Call, function: Function) -> Function | None:
        """A function without parameters, defined in this one, that a call receives to run it: `measure(step)`."""
        keys = [key_of(value) for value in call.args]
        inner = [f for key in keys for f in self._by_name.get(key, ()) if f.parent is function and not f.method]
        return inner[0] if len(inner) == 1 and not inner[0].params else None

    def _named(self, func: ast.expr, function: Function) -> Function | None:
        """The function that an expression names directly: by its name, through self, or through its class."""
        if isinstance(func, ast.Name):
            scope: Function | None = function
            while scope is not None:
                own = [f for f in self._by_name.get(func.id, ()) if f.parent is scope and not f.method]
                if own:
                    return self._latest(own, getattr(func, "lineno", 0) if scope is function else 0)
                scope = scope.parent
            is_class = func.id in self.classes and func.id not in self.names.table
            return self._method(func.id, "__init__") if is_class else None
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            owner = func.value.id
            if owner in {"self", "cls"} and function.cls:
                return self._method(function.cls, func.attr)
            if owner in self.classes:
                return self._method(owner, func.attr)
        return None

    def _latest(self, functions: list[Function], line: int) -> Function:
        """The function of a name that a call runs: of several definitions in one block the last, for a call in that block the last above it."""
        first = functions[0].node
        block = next((b for b in blocks_of(self.parents.get(first)) if first in b), []) if len(functions) > 1 else []
        lines = {getattr(f.node, "lineno", 0): f for f in functions if f.node in block}
        above = [number for number in lines if not line or number < line]
        return lines[max(above)] if above else functions[0]

    def _method(self, cls: str, name: str, depth: int = 4) -> Function | None:
        method = self.classes.get(cls, {}).get(name)
        if method is None and depth > 0:
            for base in self.bases.get(cls, ()):
                if isinstance(base, ast.Name):
                    method = method or self._method(base.id, name, depth - 1)
        return method

    def __post_init__(self) -> None:
        self._by_name: dict[str, list[Function]] = {}
        self._locals: dict[str, dict[ast.AST, list[Binding]]] = {}
        self._values: dict[
            tuple[str, Function], list[tuple[ast.expr, Function]]
        ] = {}  # asked once the outline is complete

    def defines(self, name: str) -> bool:
        """Whether a function or method of this file has the name."""
        return name in self._by_name

    def add_function(self, function: Function) -> None:
        """Register a function under its name."""
        self.functions.append(function)
        self._by_name.setdefault(function.name, []).append(function)
        if function.method:
            self.classes.setdefault(function.cls, {})[function.name] = function


def _maker(value: ast.expr) -> str | None:
    """The name that is called to create a value; None for None, "" for anything but the call of a plain name."""
    if isinstance(value, ast.Constant) and value.value is None:
        return None
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""


def _element(value: ast.expr, index: int) -> ast.expr | None:
    if isinstance(value, (ast.Tuple, ast.List)) and index < len(value.elts):
        return value.elts[index]
    return None


def last_name_of(func: ast.expr) -> str:
    """The last name of what a call calls; "" if it is no name."""
    if isinstance(func, ast.Attribute):
        return func.attr
    return func.id if isinstance(func, ast.Name) else ""
