"""The number formats an expression may name, followed through tables, strings and functions of the same file.

`values.dtypes_of` is enough for an autocast region, whose dtype stands next to it. A model's dtype comes from further away:
a table indexed by an option, a function that maps a string, a keyword in a dictionary of loading arguments. Every
possibility in the text counts, and "?" stands for those that are not in it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.objects.choices import (
    compared_formats,
    field_defaults,
    field_values,
    is_configuration,
    strings_of,
)
from halfstep.check.script.objects.values import DTYPES, MAX_VALUES, UNKNOWN, argument, constant, text_of
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import default_of

__all__ = [
    "AUTO",
    "SAME_MODEL",
    "SIXTEEN_BIT",
    "VariableCast",
    "assigned",
    "base_of",
    "cast_formats",
    "entries_named",
    "formats_of",
    "is_written",
    "keyword_of",
    "keywords_of",
    "passed_for",
    "property_values",
    "returned_by",
    "table_of",
]

SIXTEEN_BIT = frozenset({"float16", "bfloat16"})
AUTO = "auto"  # the checkpoint's own dtype
SAME_MODEL = {
    "cuda", "cpu", "train", "eval", "to", "requires_grad_", "share_memory", "apply", "to_empty", "xpu", "npu",
}  # fmt: skip  # methods that return the model itself
_NOTHING = frozenset({UNKNOWN})
_NAMED = regex(r"^(str|string|name)_?to_?(torch_)?dtype$")  # of another file: `str_to_dtype("bfloat16")`
_STRINGS = {
    "bfloat16": "bfloat16", "torch.bfloat16": "bfloat16", "float16": "float16", "torch.float16": "float16", "float32": "float32", "auto": AUTO,
}  # fmt: skip


class VariableCast(NamedTuple):
    """A cast of a variable, which may be a model or any tensor."""

    call: ast.Call
    function: Function
    key: str
    formats: frozenset[str]


def formats_of(outline: Outline, node: ast.expr | None, function: Function, depth: int = 6) -> frozenset[str]:
    """The formats that a `dtype` argument may name: torch's dtypes, their names as strings, "auto", or "?"."""
    if node is None or depth == 0:
        return _NOTHING

    def merged(parts: Iterator[tuple[ast.expr, Function]]) -> frozenset[str]:
        options = [formats_of(outline, part, scope, depth - 1) for part, scope in parts]
        return frozenset().union(*options) if 0 < len(options) <= MAX_VALUES else _NOTHING

    if isinstance(node, ast.IfExp):
        return merged((part, function) for part in (node.body, node.orelse))
    if isinstance(node, ast.Constant):
        return frozenset({_STRINGS.get(node.value, UNKNOWN)}) if isinstance(node.value, str) else _NOTHING
    name = outline.names.full(node)
    if name in DTYPES:
        return frozenset({DTYPES[name]})
    if isinstance(node, ast.Subscript):
        table = table_of(outline, node.value, function)
        if table is not None:
            return merged((value, function) for value in _entries(table, _literal(outline, node.slice, function)))
    if isinstance(node, ast.Call):
        return merged(_options_of_call(outline, node, function))
    key = key_of(node)
    if not key:
        return _NOTHING
    formats = merged(assigned(outline, key, function))
    if formats == _NOTHING and isinstance(node, ast.Attribute) and is_configuration(key.rpartition(".")[0]):
        # `cfg.dtype` of a class of this file: its default if a caller of another file creates it
        defaults = [(value, outline.module) for value in field_defaults(outline, node.attr)]
        formats |= merged(iter([*defaults, *field_values(outline, node.attr)]))
    return compared_formats(outline, node, formats)


def assigned(outline: Outline, key: str, function: Function) -> Iterator[tuple[ast.expr, Function]]:
    """The values of a variable: assigned to it, or passed for a parameter by calls in this file."""
    if key in function.params:
        passed = list(passed_for(outline, key, function))
        yield from passed
        default = default_of(function, key)
        chosen = [b for b in outline.lookup(key, function) if b.function is function and b.value is not None]
        if default is not None and constant(default) is None and chosen:
            # `if dtype is None: dtype = torch.bfloat16`: what a call without it gets.
            yield from ((b.value, function) for b in chosen if b.value is not None and b.index is None)
        elif default is not None and len(passed) < _num_calls(outline, function):
            yield default, outline.module
        return
    attribute = list(_class_attribute(outline, key, function))
    if attribute:
        yield from attribute
        return
    yield from property_values(outline, key, function)
    for binding in outline.lookup(key, function):
        if binding.value is not None and binding.index is None:
            yield binding.value, binding.function
        elif binding.value is not None:
            yield from _elements(outline, binding.value, binding.function, binding.index)


def property_values(outline: Outline, key: str, function: Function) -> Iterator[tuple[ast.expr, Function]]:
    """What `self.dtype` returns, if it is a property of the class of this function."""
    method = outline.classes.get(function.cls, {}).get(key.removeprefix("self.")) if key.startswith("self.") else None
    decorators = getattr(method.node, "decorator_list", ()) if method is not None else ()
    if method is not None and any(key_of(d).rpartition(".")[2] in {"property", "cached_property"} for d in decorators):
        yield from ((value, method) for value in returned_by(method))


def _elements(
    outline: Outline, value: ast.expr, function: Function, index: int | None
) -> Iterator[tuple[ast.expr, Function]]:
    """One of several values: of a tuple, or of the tuples that a function of this file returns."""
    target = outline.call_target(value, function) if isinstance(value, ast.Call) else None
    options = [(v, target) for v in returned_by(target)] if target is not None else [(value, function)]
    for option, scope in options:
        if isinstance(option, (ast.Tuple, ast.List)) and index is not None and index < len(option.elts):
            yield option.elts[index], scope
        else:
            yield ast.Constant(...), scope


def _num_calls(outline: Outline, function: Function) -> int:
    """How many calls in this file run a function."""
    name = function.cls if function.name == "__init__" else function.name
    return sum(outline.call_target(call, caller) is function for call, caller in outline.calls.get(name, ()))


def _class_attribute(outline: Outline, key: str, function: Function) -> Iterator[tuple[ast.expr, Function]]:
    """The value of `Config.dtype`, or of `cfg.dtype` after `cfg = Config()`, in the body of a class of this file."""
    owner, _, name = key.rpartition(".")
    if not owner.isidentifier() or outline.bindings.get(key):
        return
    classes = {owner}
    if owner not in outline.classes:
        made = [v for v in outline.values(owner, function)[:MAX_VALUES] if isinstance(v, ast.Call)]
        calls = {key_of(v.func) for v in made if not any(k.arg in {None, name} for k in v.keywords) and not v.args}
        classes = calls if len(calls) == 1 else set()
    for binding in outline.bindings.get(name, ()):
        parent = outline.parents.get(binding.node)
        if isinstance(parent, ast.ClassDef) and parent.name in classes and binding.value is not None:
            yield binding.value, outline.module


def passed_for(outline: Outline, param: str, function: Function) -> Iterator[tuple[ast.expr, Function]]:
    """What the calls in this file pass for a parameter, each with the calling function."""
    bound = function.method and function.params[:1] in {("self",), ("cls",)}
    position = function.params.index(param) - bound
    if position < 0:
        return  # `self`, which no call passes
    name = function.cls if function.name == "__init__" else function.name
    for call, caller in outline.calls.get(name, ()):
        value = argument(call, position, param)
        if value is not None and outline.call_target(call, caller) is function:
            yield value, caller


def returned_by(function: Function) -> Iterator[ast.expr]:
    """The values a function returns; functions defined inside it have their own."""
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            stack.extend(
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case))
            )


def _options_of_call(outline: Outline, call: ast.Call, function: Function) -> Iterator[tuple[ast.expr, Function]]:
    """What a call may return: `table.get(name, default)`, `getattr(torch, "bfloat16")`, a function of this file."""
    func = call.func
    if isinstance(func, ast.Attribute) and func.attr == "get" and call.args:
        table = table_of(outline, func.value, function)
        if table is not None:
            wanted = _literal(outline, call.args[0], function)
            yield from ((value, function) for value in _entries(table, wanted) or call.args[1:])
        return
    if isinstance(func, ast.Name) and func.id == "getattr" and len(call.args) > 1:
        wanted = _literal(outline, call.args[1], function)
        if outline.names.full(call.args[0]) == "torch":
            names = {wanted} if wanted is not None else strings_of(outline, call.args[1], function)
            yield from ((ast.Constant(name), function) for name in sorted(names))
        return
    target = outline.call_target(call, function)
    if target is not None:
        yield from ((value, target) for value in returned_by(target))
    elif len(call.args) == 1 and _NAMED.search(last_name(text_of(func))):
        yield call.args[0], function


def table_of(outline: Outline, node: ast.expr, function: Function) -> ast.Dict | None:
    """The dictionary literal that an expression is, if it is a single one."""
    if isinstance(node, ast.Dict):
        return node
    key = key_of(node)
    values = outline.values(key, function) if key else []
    return values[0] if len(values) == 1 and isinstance(values[0], ast.Dict) else None


def _literal(outline: Outline, node: ast.expr, function: Function) -> str | None:
    """The string that an expression is, if the text has only one."""
    values = {constant(node)}
    key = key_of(node)
    if key:
        find = _class_attribute if "." in key else assigned
        values = {constant(v) for v, _ in find(outline, key, function)} or {...}
    value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, str) else None


def _entries(table: ast.Dict, wanted: str | None) -> list[ast.expr]:
    """The entry of a literal key, or every entry if the key is only known at run time."""
    if wanted is not None:
        return [v for k, v in zip(table.keys, table.values, strict=True) if constant(k) == wanted]
    return table.values


def entries_named(outline: Outline, key: str, function: Function) -> Iterator[tuple[ast.expr, Function]]:
    """What `parts["model"]` is: that entry of a dictionary, or of the one that a function of this file returns."""
    owner, _, name = key.rpartition("[")
    for value, scope in outline.sources(owner, function)[:MAX_VALUES] if name[:1] in {"'", '"'} else ():
        target = outline.call_target(value, scope) if isinstance(value, ast.Call) else None
        options = [(v, target) for v in returned_by(target)] if target is not None else [(value, scope)]
        for option, inner in options:
            known = [v for v, _ in outline.sources(key_of(option), inner)] if key_of(option) else [option]
            entries = [_entry_of(table, name[1:-2]) for table in known[:MAX_VALUES]]
            yield from ((entry, inner) for entry in entries if entry is not None)


def keyword_of(outline: Outline, call: ast.Call, function: Function, *names: str) -> ast.expr | None:
    """A keyword argument under any of its names, also from `**options` with a dictionary of this file, or `**make_options()`."""
    for keyword in call.keywords:
        if keyword.arg in names:
            return keyword.value
    for keyword in call.keywords:
        if keyword.arg is not None:
            continue
        key = key_of(keyword.value)
        target = outline.call_target(keyword.value, function) if isinstance(keyword.value, ast.Call) else None
        parts = [p for p in returned_by(target) if key_of(getattr(p, "func", None)) in {"", "dict"}] if target else []
        for part in parts:  # not what another function makes: functions may call each other
            inner = keyword_of(outline, ast.Call(call.func, [], [ast.keyword(None, part)]), target or function, *names)
            if inner is not None and (not key_of(inner) or outline.names.full(inner)):  # no variable of that function
                return inner
        options = outline.values(key, function)[:MAX_VALUES] if key else [keyword.value]
        for name in names:
            for binding in outline.bindings.get(f"{key}[{name!r}]", ()) if key else ():
                if binding.value is not None and binding.function is function:
                    return binding.value
            for option in (*options, *(_added_options(outline, key, function) if key else ())):
                value = _entry_of(option, name)
                if value is not None:
                    return value
    return None


def keywords_of(outline: Outline, call: ast.Call, function: Function, *names: str) -> list[ast.expr]:
    """Every value of a keyword argument: `**options` may have one per branch, `if a: options["dtype"] = ...`, `elif b: ...`."""
    first = keyword_of(outline, call, function, *names)
    if first is None or any(keyword.value is first for keyword in call.keywords):
        return [first] if first is not None else []
    keys = [key_of(keyword.value) for keyword in call.keywords if keyword.arg is None]
    entries = [f"{key}[{name!r}]" for key in keys if key for name in names]
    bound = [b.value for entry in entries for b in outline.bindings.get(entry, ()) if b.function is function]
    return list(dict.fromkeys((first, *(value for value in bound if value is not None))))


def is_written(outline: Outline, options: ast.expr, function: Function) -> bool:
    """Whether the text shows every key of `**options`: one dictionary of this function, and what is added to it by name."""
    key = key_of(options)
    bound = [b for b in outline.lookup(key, function) if b.function is function] if key else []
    value = bound[0].value if len(bound) == 1 and key not in function.params else None if key else options
    is_literal = isinstance(value, ast.Dict) and None not in value.keys
    is_literal |= isinstance(value, ast.Call) and key_of(value.func) == "dict" and all(k.arg for k in value.keywords)
    added = _added_options(outline, key, function) if key else ()
    return is_literal and all(isinstance(part, ast.Dict) and None not in part.keys for part in added)


def _added_options(outline: Outline, key: str, function: Function) -> Iterator[ast.expr]:
    """What `options.update(torch_dtype=...)` and `options.setdefault("torch_dtype", ...)` add to a dictionary, as dictionaries."""
    for method in ("update", "setdefault"):
        for call, scope in outline.calls.get(method, ()):
            is_own = isinstance(call.func, ast.Attribute) and key_of(call.func.value) == key and scope is function
            if is_own and method == "setdefault" and len(call.args) == 2:
                yield ast.Dict([call.args[0]], [call.args[1]])
            elif is_own and method == "update":
                yield from call.args[:1]
                yield ast.Dict(
                    [ast.Constant(k.arg) for k in call.keywords if k.arg], [k.value for k in call.keywords if k.arg]
                )


def _entry_of(node: ast.expr, name: str) -> ast.expr | None:
    """An entry of `{...}` or `dict(...)` by its key."""
    if isinstance(node, ast.Dict):
        return next((v for k, v in zip(node.keys, node.values, strict=True) if constant(k) == name), None)
    if isinstance(node, ast.Call) and key_of(node.func) == "dict":
        return next((k.value for k in node.keywords if k.arg == name), None)
    return None


def cast_formats(outline: Outline, call: ast.Call, function: Function) -> frozenset[str]:
    """The formats a call casts its receiver to: `.half()`, `.to(device, dtype)`; empty if it is no cast."""
    func = call.func
    if not isinstance(func, ast.Attribute):
        return frozenset()
    if func.attr in {"half", "bfloat16", "float"} and not call.args and not call.keywords:
        return frozenset({{"half": "float16", "bfloat16": "bfloat16", "float": "float32"}[func.attr]})
    if func.attr not in {"to", "type", "to_empty"}:
        return frozenset()
    options = (formats_of(outline, v, function) for v in keywords_of(outline, call, function, "dtype") or call.args)
    return next((formats for formats in options if formats & (SIXTEEN_BIT | {"float32"})), frozenset())


def base_of(node: ast.expr) -> ast.expr:
    """The model under a chain of casts and moves: `model` of `model.to(device).half()`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr not in SAME_MODEL | {"half", "bfloat16", "float", "type"}:
            break
        node = node.func.value
    return node
