"""Where a setting comes from: the one value that a variable, an attribute or an entry has in a file.

A setting passes through several places before a call uses it: a constant, a class or a dataclass, a namespace, a dictionary
of dictionaries, a property, an element of what a function returns. Each place is one step, with the function in which its
value is written. A place that the file may set twice, or under a condition, has no value.
"""

from __future__ import annotations

import ast
from functools import cached_property

from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outcome import outcome
from halfstep.check.script.syntax.outline import Binding, Function, Outline
from halfstep.check.script.syntax.scope import default_of, is_configured

__all__ = ["Constants", "Scoped"]

Scoped = tuple[ast.expr, Function]  # an expression, and the function that contains it
MAX_DEPTH = 6
MAX_LENGTH = 40  # of a string: a longer one is a path or a text
_DTYPE_NAMES = {"float16", "half", "bfloat16", "float32", "float"}
_DTYPES = {f"torch.{name}" for name in _DTYPE_NAMES}
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.ExceptHandler, ast.Match)
_CHANGES = {"update", "setdefault", "pop", "clear", "popitem"}  # of a dictionary
# Objects whose attributes are the keywords, or the entries of the dictionary, that they are created from.
_NAMESPACES = {
    "SimpleNamespace", "Namespace", "EasyDict", "edict", "AttrDict", "DotDict", "Munch", "Box", "ConfigDict", "DictConfig", "addict",
}  # fmt: skip
_ENUMS = {"Enum", "StrEnum", "IntEnum"}


class Constants:
    """The settings of a file that have one value."""

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        calls = outline.calls
        self.has_dtypes = not _DTYPE_NAMES.isdisjoint(outline.loads.keys() | outline.strings)
        self._variables: dict[tuple[str, Function], Scoped | None] = {}
        # nanoGPT's configurator and the like: every global may be changed by name.
        sites = (site for name in ("exec", "globals", "eval") for site in calls.get(name, ()))
        self.fixed_globals = not any(isinstance(site.call.func, ast.Name) for site in sites)  # `model.eval()` is none
        self.fixed_attributes = (
            not {"setattr", "vars", "__setattr__"} & calls.keys() and "__dict__" not in outline.loads
        )
        self._writers: dict[str, set[Function]] = {}  # the functions that declare a global variable
        for function in outline.functions:
            for statement in function.body:
                if isinstance(statement, ast.Global):
                    for name in statement.names:
                        self._writers.setdefault(name, set()).add(function)

    def literal(self, node: ast.expr, function: Function, depth: int = MAX_DEPTH) -> ast.expr | None:
        """The literal that a setting is; None if the file does not decide it."""
        if is_literal(self.outline, node):
            return node
        source = self.source(node, function) if depth else None
        return self.literal(*source, depth - 1) if source is not None else None

    def source(self, node: ast.expr, function: Function) -> Scoped | None:
        """What a setting is set to, if that happens once and under no condition."""
        if isinstance(node, ast.Name):
            key = (node.id, function)
            if key not in self._variables:
                self._variables[key] = self._variable(*key)
            return self._variables[key]
        if isinstance(node, ast.Attribute):
            if not self.fixed_attributes:
                return None
            key = (key_of(node), function)
            if not key[0]:
                return self._attribute(node, function)
            if key not in self._variables:
                self._variables[key] = self._attribute(node, function)
            return self._variables[key]
        if isinstance(node, ast.Subscript):
            return self._entry(node.value, node.slice, function) if key_of(node) not in self.outline.bindings else None
        if isinstance(node, ast.NamedExpr):
            return node.value, function
        return self._result(node, function) if isinstance(node, ast.Call) else None

    def _entry(self, table: ast.expr, index: ast.expr, function: Function) -> Scoped | None:
        """The entry of a dictionary under a key that is a literal or stands for one."""
        entries = self.table(table, function)
        key = index if isinstance(index, ast.Constant) else self.literal(index, function, 2) if entries else None
        return entries.get(key.value) if entries is not None and isinstance(key, ast.Constant) else None

    def _result(self, call: ast.Call, function: Function) -> Scoped | None:
        """What a function of this file returns, `table.get(name)`, or `getattr(torch, name)`."""
        if isinstance(call.func, ast.Attribute) and call.func.attr == "get" and call.args:
            return self._entry(call.func.value, call.args[0], function)
        is_getattr = isinstance(call.func, ast.Name) and call.func.id == "getattr"
        if is_getattr and len(call.args) == 2 and self.outline.names.full(call.args[0]) == "torch":
            name = self.literal(call.args[1], function, 3)
            if isinstance(name, ast.Constant) and f"torch.{name.value!s}" in _DTYPES:
                return ast.copy_location(
                    ast.Attribute(ast.Name("torch", ast.Load()), str(name.value), ast.Load()), call
                ), function
            return None
        target = self.outline.call_target(call, function)
        value = outcome(call, target) if target is not None and target.name != "__init__" else None
        return (value, target) if value is not None and target is not None else None

    def _parameter(self, name: str, function: Function) -> Scoped | None:
        """What the only call in the file passes for a parameter, or its default if no call and no decorator passes it."""
        if name in self.outline.bindings and any(b.function is function for b in self.outline.bindings[name]):
            return None
        sites = self.outline.calls.get(function.cls if function.name == "__init__" else function.name, ())
        calls = [site for site in sites if self.outline.call_target(site.call, site.function) is function]
        hidden = any(isinstance(a, ast.Starred) for site in calls for a in site.call.args)
        if not calls or hidden or any(k.arg is None for site in calls for k in site.call.keywords):
            return None
        # Not `outline.passed`, which does not know calls through an object: `agent.evaluate(x, use_amp=True)`.
        position = function.params.index(name) - (function.method and function.params[0] in {"self", "cls"})
        passed = [(value, caller) for call, caller in calls for value in _passed(call, position, name)]
        if not passed:
            default = default_of(function, name) if not is_configured(function) else None
            return (default, function.parent or function) if default is not None else None
        return passed[0] if len(calls) == 1 else None

    def _variable(self, name: str, function: Function) -> Scoped | None:
        """What the variable of the nearest scope is assigned, if that happens once."""
        bound = self.outline.by_function(name)
        writers = self._writers.get(name, set())
        written = [b for writer in writers for b in bound.get(writer.node, ()) if not self._is_field(b)]
        scope: Function | None = function
        while scope is not None:
            if name in scope.params:
                return self._parameter(name, scope)
            here = [b for b in bound.get(scope.node, ()) if not self._is_field(b)] if scope not in writers else []
            if isinstance(scope.node, ast.Module) and writers - {b.function for b in written}:
                return None  # written in a function that the outline does not contain
            if isinstance(scope.node, ast.Module) and written:  # `DTYPE = None` until `setup` runs
                here = [*(b for b in here if not _is_none(b.value)), *written]
            if here:
                is_fixed = self.fixed_globals or not isinstance(scope.node, ast.Module)
                return self._bound(here[0]) if len(here) == 1 and self._is_plain(here[0]) and is_fixed else None
            scope = scope.parent
        return None

    def _is_field(self, binding: Binding) -> bool:
        """Whether an assignment is in the body of a class: it is read with the name of the class."""
        return isinstance(self.outline.parents.get(binding.node), ast.ClassDef)

    def _bound(self, binding: Binding) -> Scoped | None:
        """The value of an assignment; of one with several targets, the element of the tuple for this one."""
        value, scope, index = binding.value, binding.function, binding.index
        if value is None or index is None:
            return (value, scope) if value is not None else None
        for _ in range(MAX_DEPTH):
            if isinstance(value, (ast.Tuple, ast.List)):
                is_plain = index < len(value.elts) and not any(isinstance(e, ast.Starred) for e in value.elts)
                return (value.elts[index], scope) if is_plain else None
            source = self.source(value, scope)
            if source is None:
                return None
            value, scope = source
        return None

    def _attribute(self, node: ast.Attribute, function: Function) -> Scoped | None:
        """`self.fp16`, set once in its class or a base of it, or `Config.fp16` and `cfg.fp16` with `cfg = Config()`, from the body of the class."""
        key, owner = key_of(node), key_of(node.value)
        if not self._may_be_set(node.attr, key):
            return None
        if owner == "self" and function.cls:
            if own := self._assigned(key, function.cls):
                return self._bound(own[0]) if len(own) == 1 and self._is_plain(own[0]) else None
            if (result := self._property(function.cls, node.attr)) is not None:
                return result
        member = self._member(node.value) if node.attr == "value" else None
        if member is not None:
            return member
        cls, made = self._object(node.value, function)
        if cls:
            return self._field(node.attr, owner, cls, made)
        entries = self._namespace(*made) if made is not None else None
        is_fixed = owner and key not in self.outline.bindings and not self._is_changed(owner)
        return entries.get(node.attr) if entries is not None and is_fixed else None

    def _assigned(self, key: str, cls: str, depth: int = MAX_DEPTH) -> list[Binding]:
        """The assignments of an attribute in a class, or in the nearest of its bases that has any."""
        own = [b for b in self.outline.bindings.get(key, ()) if b.function.cls == cls]
        for base in self.outline.bases.get(cls, ()) if depth else ():
            own = own or self._assigned(key, key_of(base), depth - 1)
        return own

    def _may_be_set(self, name: str, key: str) -> bool:
        """Whether anything in the file sets an attribute of this name; nothing does for most, and where objects come from takes long."""
        bindings, strings = self.outline.bindings, self.outline.strings
        is_set = key in bindings or name in bindings or self.outline.defines(name) or name in strings
        return is_set or name == "value" or self._has_namespaces

    @cached_property
    def _has_namespaces(self) -> bool:
        imported = self.outline.names.table
        return any(
            last == "create" or last in _NAMESPACES or imported.get(last, "").rsplit(".", 1)[-1] in _NAMESPACES
            for last in self.outline.calls
        )

    def _property(self, cls: str, name: str) -> Scoped | None:
        """What a property of a class returns."""
        method = self.outline.classes.get(cls, {}).get(name)
        decorators = getattr(method.node, "decorator_list", ()) if method is not None else ()
        if method is None or not any(
            key_of(d).rsplit(".", 1)[-1] in {"property", "cached_property"} for d in decorators
        ):
            return None
        value = outcome(ast.Call(ast.Name(name, ast.Load()), [], []), method)
        return (value, method) if value is not None else None

    def _member(self, node: ast.expr) -> Scoped | None:
        """The value of a member of an Enum: of `Precision.HALF` in `Precision.HALF.value`."""
        cls = key_of(node.value) if isinstance(node, ast.Attribute) else ""
        bases = {key_of(base).rsplit(".", 1)[-1] for base in self.outline.bases.get(cls, ())}
        return self._declared(node.attr, cls) if isinstance(node, ast.Attribute) and bases & _ENUMS else None

    def _field(self, name: str, owner: str, cls: str, made: tuple[ast.Call, Function] | None) -> Scoped | None:
        """The value of a field: passed where the object is created, or its default in the body of the class."""
        if self._is_written(name, owner, cls):
            return None
        passed = [k.value for k in made[0].keywords if k.arg == name] if made is not None else []
        declared = self._declared(name, cls)
        if passed and made is not None:
            return (
                (passed[0], made[1]) if declared is not None and "__init__" not in self.outline.classes[cls] else None
            )
        return declared or self._property(cls, name)

    def _fields(self, owner: ast.expr, function: Function) -> dict[object, Scoped] | None:
        """The fields of an object of a dataclass of this file: `asdict(config)`; one without a known value stands for itself."""
        cls, made = self._object(owner, function)
        body = next(
            (c.body for c in getattr(self.outline.module.node, "body", ()) if getattr(c, "name", "") == cls), ()
        )
        names = [s.target.id for s in body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
        own: dict[object, Scoped] = {}
        for name in names if cls and not self.outline.bases.get(cls) else ():
            own[name] = self._field(name, key_of(owner), cls, made) or (
                ast.copy_location(ast.Attribute(owner, name, ast.Load()), owner),
                function,
            )
        return own or None

    def _declared(self, name: str, cls: str) -> Scoped | None:
        """The default of a field in the body of a class."""
        fields = [
            b
            for b in self.outline.bindings.get(name, ())
            if isinstance(parent := self.outline.parents.get(b.node), ast.ClassDef) and parent.name == cls
        ]
        value = fields[0].value if len(fields) == 1 and self._is_plain(fields[0]) else None
        if isinstance(value, ast.Call) and key_of(value.func).rsplit(".", 1)[-1] in {"field", "Field"}:
            default = next((k.value for k in value.keywords if k.arg == "default"), None)
            factory = next((k.value for k in value.keywords if k.arg == "default_factory"), None)
            if isinstance(factory, ast.Name):
                default = ast.copy_location(ast.Call(factory, [], []), factory)
            elif isinstance(factory, ast.Lambda):
                default = factory.body
            value = default
        return (value, self.outline.module) if value is not None else None

    def _object(self, owner: ast.expr, function: Function) -> tuple[str, tuple[ast.Call, Function] | None]:
        """The class of this file that an expression is or is made from, "" for none, and the call that makes it."""
        key = key_of(owner)
        if key in {"self", "cls"}:
            return function.cls, None
        if key in self.outline.classes:
            return key, None
        outer, _, last = key.rpartition(".")
        if last in self.outline.classes and outer.rpartition(".")[2] in self.outline.classes:
            return last, None  # a class in the body of another
        made = self._creation(owner, function)
        if made is None or any(k.arg is None for k in made[0].keywords):
            return "", None
        cls = key_of(made[0].func)
        if cls not in self.outline.classes or cls in self.outline.names.table:
            return "", made
        return (cls, made) if not made[0].args else ("", None)

    def _creation(self, node: ast.expr, function: Function) -> tuple[ast.Call, Function] | None:
        """The one call that makes an object."""
        source: Scoped | None = (node, function)
        for _ in range(MAX_DEPTH):
            if source is None or isinstance(source[0], ast.Call):
                break
            source = self.source(*source)
        if source is not None and isinstance(source[0], ast.Call):
            return source[0], source[1]
        values = self.outline.values(key, function) if (key := key_of(node)) else []
        return (values[0], function) if len(values) == 1 and isinstance(values[0], ast.Call) else None

    def _namespace(self, call: ast.Call, function: Function) -> dict[object, Scoped] | None:
        """The attributes of `SimpleNamespace(amp=True)` or `OmegaConf.create({"amp": True})`; None for any other call."""
        name = self.outline.names.full(call.func).rsplit(".", 1)[-1] or key_of(call.func).rsplit(".", 1)[-1]
        is_loaded = key_of(call.func) == "OmegaConf.create"
        if name not in _NAMESPACES and not is_loaded:
            return None
        if len(call.args) == 1 and not call.keywords:
            return self.table(call.args[0], function)
        return {k.arg: (k.value, function) for k in call.keywords} if not call.args else None

    def _is_written(self, name: str, owner: str, cls: str) -> bool:
        """Whether something assigns the attribute of an object or a class."""
        keys = {f"{owner}.{name}", f"{cls}.{name}", f"cls.{name}"}
        own = (b for b in self.outline.bindings.get(f"self.{name}", ()) if b.function.cls == cls)
        return any(self.outline.bindings.get(key) for key in keys) or next(own, None) is not None

    def _is_plain(self, binding: Binding) -> bool:
        """Whether an assignment has a value and runs under no condition, other than that the file is run as a script."""
        if binding.value is None:
            return False
        parent = self.outline.parents.get(binding.node)
        while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if isinstance(parent, _BLOCKS) and not (isinstance(parent, ast.If) and _is_main(parent.test)):
                return False
            parent = self.outline.parents.get(parent)
        return True

    def table(self, node: ast.expr, function: Function) -> dict[object, Scoped] | None:
        """The entries of a dictionary that nothing changes; None for anything else."""
        key = key_of(node)
        if isinstance(node, ast.Call) and key_of(node.func).rsplit(".", 1)[-1] == "asdict" and len(node.args) == 1:
            return self._fields(node.args[0], function)
        if isinstance(node, (ast.Dict, ast.Call)):
            return self._entries(node, function)
        source = self.source(node, function) if key and not self._is_changed(key) else None
        return self._entries(*source) if source is not None else None

    def _entries(self, node: ast.expr, function: Function) -> dict[object, Scoped] | None:
        """The entries of `{...}`, `dict(...)` or a namespace with plain keys, those of `**other` included."""
        if isinstance(node, ast.Dict):
            entries: dict[object, Scoped] = {}
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    entries[key.value] = (value, function)
                    continue
                spread = self.table(value, function) if key is None and not isinstance(value, ast.Call) else None
                if spread is None:
                    return None
                entries |= spread
            return entries
        if not isinstance(node, ast.Call):
            return None
        if key_of(node.func) == "dict":
            is_plain = not node.args and all(k.arg for k in node.keywords)
            return {k.arg: (k.value, function) for k in node.keywords} if is_plain else None
        return self._namespace(node, function)

    def _is_changed(self, key: str) -> bool:
        """Whether a method changes a dictionary, or an entry is assigned under a name that the text does not show."""
        return key in self._changed or key in self._computed

    @cached_property
    def _changed(self) -> set[str]:
        calls = [site.call for method in _CHANGES for site in self.outline.calls.get(method, ())]
        return {key_of(call.func.value) for call in calls if isinstance(call.func, ast.Attribute)}

    @cached_property
    def _computed(self) -> set[str]:
        keys = [key for key in self.outline.bindings if "[" in key]
        return {k[:i] for k in keys for i, char in enumerate(k) if char == "[" and k[i + 1] not in "'\""}


def is_literal(outline: Outline, node: ast.expr) -> bool:
    """Whether an expression is a flag, a short string or a dtype of torch."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool) or (isinstance(node.value, str) and len(node.value) < MAX_LENGTH)
    is_named = isinstance(node, ast.Attribute) and node.attr in _DTYPE_NAMES and isinstance(node.value, ast.Name)
    return is_named and outline.names.full(node) in _DTYPES


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_main(test: ast.expr) -> bool:
    """Whether a test is `__name__ == "__main__"`."""
    return isinstance(test, ast.Compare) and key_of(test.left) == "__name__"


def _passed(call: ast.Call, position: int, name: str) -> list[ast.expr]:
    """What a call passes for a parameter, by name or by position."""
    by_name = [k.value for k in call.keywords if k.arg == name]
    return by_name or call.args[position : position + 1]
