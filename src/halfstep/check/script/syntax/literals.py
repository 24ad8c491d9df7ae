"""Settings written in place: `fp16=CFG.fp16` is read as `fp16=True` where the file shows the one value it has.

People keep settings apart from the call that uses them: a constant, a class of constants, a dataclass with defaults, a
dictionary, or the options of a call collected in a dictionary and passed as `**options`. A rule that reads the arguments
of a call would have to know all of these forms. Here each call receives what it would have if the settings were written in
it, once, before any rule runs.

Only a setting that the file cannot change is replaced: one assignment, under no condition, and nothing that writes to it by
another way. Numbers stay: their names show what they count (`accumulation_steps`).
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from functools import cached_property

from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Binding, Function, Outline
from halfstep.check.script.syntax.scope import default_of

__all__ = ["write_in_place"]

MAX_DEPTH = 4
MAX_LENGTH = 40  # of a string: a longer one is a path or a text
_DTYPE_NAMES = {"float16", "half", "bfloat16", "float32", "float"}
_DTYPES = {f"torch.{name}" for name in _DTYPE_NAMES}
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.ExceptHandler, ast.Match)
_CHANGES = {"update", "setdefault", "pop", "clear", "popitem"}  # of a dictionary
# A switch that is off: whoever writes `USE_AMP = False` may turn it on, and the code behind it is not dead.
_SWITCHES = {"enabled"}
_PARTS = re.compile(r"save|check_?point|ckpt|snapshot|resum|restor|state", re.IGNORECASE)


def write_in_place(outline: Outline) -> None:
    """Replace the settings in the arguments of every call by their literals."""
    reader = _Reader(outline)
    for sites in outline.calls.values():
        for call, function in sites:
            if any(k.arg is None for k in call.keywords) and _is_configured(outline, call, function):
                call.keywords = [part for keyword in call.keywords for part in reader.spread(keyword, function)]
            for keyword in call.keywords:
                literal = reader.setting(keyword.value, function) if keyword.arg is not None else None
                is_off = isinstance(literal, ast.Constant) and not literal.value
                if literal is not None and not (is_off and keyword.arg in _SWITCHES):
                    keyword.value = _written(outline, literal, keyword.value, keyword)
            for index, value in enumerate(call.args if reader.has_dtypes else ()):
                literal = reader.setting(value, function)
                if isinstance(literal, ast.Attribute):  # a dtype, `.to(cfg.dtype)`: other arguments differ in meaning
                    call.args[index] = _written(outline, literal, value, call)


def _is_configured(outline: Outline, call: ast.Call, function: Function) -> bool:
    """Whether the `**options` of a call are settings: not the parts of a checkpoint, nor what a function of this file takes apart."""
    return not _PARTS.search(key_of(call.func).rsplit(".", 1)[-1]) and outline.call_target(call, function) is None


def _written(outline: Outline, literal: ast.expr, old: ast.expr, parent: ast.AST) -> ast.expr:
    """A copy of a literal in the place of the expression that stands for it: a fix edits this place only."""
    copied = copy.deepcopy(literal)
    for part in ast.walk(copied):
        if isinstance(part, ast.expr):
            ast.copy_location(part, old)
    outline.parents[copied] = parent
    return copied


class _Reader:
    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        calls = outline.calls
        self.has_dtypes = not _DTYPE_NAMES.isdisjoint(outline.loads)
        # nanoGPT's configurator and the like: every global may be changed by name.
        self.fixed_globals = not {"exec", "globals", "eval"} & calls.keys()
        self.fixed_attributes = (
            not {"setattr", "vars", "__setattr__"} & calls.keys() and "__dict__" not in outline.loads
        )

    def setting(self, node: ast.expr, function: Function) -> ast.expr | None:
        """The literal that a variable, an attribute or an entry stands for; None for anything else."""
        is_named = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and not _is_literal(self.outline, node)
        return self.literal(node, function) if is_named else None

    def literal(self, node: ast.expr, function: Function, depth: int = MAX_DEPTH) -> ast.expr | None:
        """The literal that a setting is; None if the file does not decide it."""
        if _is_literal(self.outline, node):
            return node
        if isinstance(node, ast.Name) and node.id in function.params and depth:
            passed = self._parameter(node.id, function)
            return self.literal(*passed, depth - 1) if passed is not None else None
        value = self._value(node, function) if depth else None
        return self.literal(value, function, depth - 1) if value is not None else None

    def _parameter(self, name: str, function: Function) -> tuple[ast.expr, Function] | None:
        """What the only call in the file passes for a parameter, or its default if no call passes it."""
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
            default = default_of(function, name)
            return (default, function.parent or function) if default is not None else None
        return passed[0] if len(calls) == 1 else None

    def _value(self, node: ast.expr, function: Function) -> ast.expr | None:
        """What a constant, an attribute or an entry is set to, if that happens once and under no condition."""
        if isinstance(node, ast.Name):
            return self._variable(node.id, function)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, function) if self.fixed_attributes else None
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            table = self.table(node.value, function)
            if table is not None and key_of(node) not in self.outline.bindings:
                return table.get(node.slice.value)
        return None

    def _variable(self, name: str, function: Function) -> ast.expr | None:
        bindings = self.outline.bindings.get(name, ())
        scope: Function | None = function
        while scope is not None:
            if name in scope.params:
                return None
            scope = scope.parent
        if len(bindings) != 1 or not self._is_plain(bindings[0]):
            return None
        binding = bindings[0]
        if isinstance(self.outline.parents.get(binding.node), ast.ClassDef):
            return None  # read with the name of its class
        if isinstance(binding.function.node, ast.Module):
            return binding.value if self.fixed_globals else None
        return binding.value if _encloses(binding.function, function) else None

    def _attribute(self, node: ast.Attribute, function: Function) -> ast.expr | None:
        """`self.fp16`, set once in its class, or `Config.fp16` and `cfg.fp16` with `cfg = Config()`, from the body of the class."""
        key, owner = key_of(node), key_of(node.value)
        if owner == "self" and function.cls:
            own = [b for b in self.outline.bindings.get(key, ()) if b.function.cls == function.cls]
            if own:
                return own[0].value if len(own) == 1 and self._is_plain(own[0]) else None
        cls = self._class_of(node.value, node.attr, function)
        if not cls or self._is_written(node.attr, owner, cls):
            return None
        fields = [
            b
            for b in self.outline.bindings.get(node.attr, ())
            if isinstance(parent := self.outline.parents.get(b.node), ast.ClassDef) and parent.name == cls
        ]
        value = fields[0].value if len(fields) == 1 and self._is_plain(fields[0]) else None
        if isinstance(value, ast.Call) and key_of(value.func).rsplit(".", 1)[-1] == "field":
            return next((k.value for k in value.keywords if k.arg == "default"), None)
        return value

    def _class_of(self, owner: ast.expr, name: str, function: Function) -> str:
        """The class of this file that an object is, or is made from without a value for the attribute `name`."""
        key = key_of(owner)
        if key in {"self", "cls"}:
            return function.cls
        if key in self.outline.classes:
            return key
        values = self.outline.values(key, function) if key else []
        value = values[0] if len(values) == 1 else None
        if not isinstance(value, ast.Call) or value.args or any(k.arg in {None, name} for k in value.keywords):
            return ""
        cls = key_of(value.func)
        return cls if cls in self.outline.classes and cls not in self.outline.names.table else ""

    def _is_written(self, name: str, owner: str, cls: str) -> bool:
        """Whether something assigns the attribute of an object or a class."""
        keys = {f"{owner}.{name}", f"{cls}.{name}", f"cls.{name}"}
        own = (b for b in self.outline.bindings.get(f"self.{name}", ()) if b.function.cls == cls)
        return any(self.outline.bindings.get(key) for key in keys) or next(own, None) is not None

    def _is_plain(self, binding: Binding) -> bool:
        """Whether an assignment has one target and runs under no condition."""
        if binding.value is None or binding.index is not None:
            return False
        parent = self.outline.parents.get(binding.node)
        while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if isinstance(parent, _BLOCKS):
                return False
            parent = self.outline.parents.get(parent)
        return True

    def table(self, node: ast.expr, function: Function) -> dict[object, ast.expr] | None:
        """The entries of a dictionary that nothing changes; None for anything else."""
        key = key_of(node)
        if isinstance(node, (ast.Dict, ast.Call)):
            return _entries(node)
        value = self._value(node, function) if key and not self._is_changed(key) else None
        return _entries(value) if value is not None else None

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

    def spread(self, keyword: ast.keyword, function: Function) -> Iterator[ast.keyword]:
        """A keyword argument; for `**options`, those of a dictionary of this file."""
        entries = self.table(keyword.value, function) if keyword.arg is None else None
        key = key_of(keyword.value)
        added = any(k.startswith(f"{key}[") for k in self.outline.bindings) if key and entries is not None else False
        if not entries or added or not all(isinstance(name, str) for name in entries):
            yield keyword
            return
        for name, value in entries.items():
            part = ast.copy_location(ast.keyword(str(name), value), value)
            self.outline.parents[part] = self.outline.parents[keyword]
            yield part


def _passed(call: ast.Call, position: int, name: str) -> list[ast.expr]:
    """What a call passes for a parameter, by name or by position."""
    by_name = [k.value for k in call.keywords if k.arg == name]
    return by_name or call.args[position : position + 1]


def _encloses(outer: Function, function: Function) -> bool:
    scope: Function | None = function
    while scope is not None and scope is not outer:
        scope = scope.parent
    return scope is outer


def _is_literal(outline: Outline, node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool) or (isinstance(node.value, str) and len(node.value) < MAX_LENGTH)
    return isinstance(node, ast.Attribute) and outline.names.full(node) in _DTYPES and isinstance(node.value, ast.Name)


def _entries(node: ast.expr) -> dict[object, ast.expr] | None:
    """The entries of `{...}` or `dict(...)` with plain keys."""
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {
            key.value: value for key, value in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)
        }
    if (
        isinstance(node, ast.Call)
        and key_of(node.func) == "dict"
        and not node.args
        and all(k.arg for k in node.keywords)
    ):
        return {k.arg: k.value for k in node.keywords}
    return None
