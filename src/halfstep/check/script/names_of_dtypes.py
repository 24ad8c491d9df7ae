"""The strings that a dtype is named by in some run: through variables, attributes, properties, tables, options and tests.

Unlike `strings_of`, which gives every value that the text mentions, this reader drops what is certainly replaced before
its use: `if name == "bf16": name = "bfloat16"`, and the values that a test around the use excludes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.script.objects.choices import MAX_VALUES, UNKNOWN, argument, constant, pairs_of, strings_of, text_of
from halfstep.check.script.objects.formats import returned_by, table_of
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["possible_strings"]

_MAX_DEPTH = 6


def possible_strings(outline: Outline, node: ast.expr, function: Function) -> dict[str, str]:
    """The strings an expression is in some run, each with the setting that must have this value; "" if it is computed."""
    return dict(_strings(outline, node, function, _MAX_DEPTH))


def _strings(outline: Outline, node: ast.expr, function: Function, depth: int) -> Iterator[tuple[str, str]]:
    value = constant(node)
    if isinstance(value, str):
        yield value, ""
    elif depth == 0 or value is not ...:
        return
    elif isinstance(node, ast.IfExp):
        for arm in (node.body, node.orelse):
            yield from _strings(outline, arm, function, depth - 1)
    elif isinstance(node, ast.Subscript) and (table := table_of(outline, node.value, function)) is not None:
        wanted = constant(node.slice)
        for key, entry in zip(table.keys, table.values, strict=True):
            if wanted in (..., constant(key)):
                yield from _strings(outline, entry, function, depth - 1)
    elif isinstance(node, ast.Call):
        target = outline.call_target(node, function)
        for part in returned_by(target) if target is not None and target.name != "__init__" else ():
            yield from _strings(outline, part, target or function, depth - 1)
    elif key_of(node):
        yield from _named(outline, node, function, depth)


def _named(outline: Outline, node: ast.expr, function: Function, depth: int) -> Iterator[tuple[str, str]]:
    """The strings of a variable, an attribute, a property or an option, as far as the tests around it leave them."""
    only, never = _tested(outline, node)
    if only is not None:
        yield from ((name, text_of(node)) for name in sorted(only - never))
        return
    key = key_of(node)
    sources = [(v, f) for v, f in outline.sources(key, function) if v is not node][:MAX_VALUES]
    if not sources and isinstance(node, ast.Attribute) and not any(_returned(outline, node.attr)):
        names = _field_choices(outline, node.attr) or strings_of(outline, node, function)
        # Only declared choices are all that it may be; a default may be replaced by the file that the user writes.
        yield from ((n, text_of(node)) for n in sorted(names - never) if UNKNOWN not in names)
    if len(sources) > 1 and not _exclude_each_other(outline, [value for value, _ in sources]):
        return
    if not sources and isinstance(node, ast.Attribute):
        sources = list(_returned(outline, node.attr))
    for value, scope in sources:
        yield from ((s, asked) for s, asked in _strings(outline, value, scope, depth - 1) if s not in never)


def _returned(outline: Outline, name: str) -> Iterator[tuple[ast.expr, Function]]:
    """What the only property of this name in the file returns."""
    methods = [methods[name] for methods in outline.classes.values() if name in methods]
    decorators = getattr(methods[0].node, "decorator_list", ()) if len(methods) == 1 else ()
    if any(last_name(key_of(d)) in {"property", "cached_property"} for d in decorators):
        yield from ((value, methods[0]) for value in returned_by(methods[0]))


def _exclude_each_other(outline: Outline, values: list[ast.expr]) -> bool:
    """Whether the values of a variable are assigned in the branches of one `if`: none replaces another."""
    tops = [[n for n in outline.above(value) if isinstance(n, ast.If)][-1:] for value in values]
    return bool(tops[0]) and all(top == tops[0] for top in tops)


def _tested(outline: Outline, node: ast.expr) -> tuple[frozenset[str] | None, frozenset[str]]:
    """The only strings that the tests around the use of a variable leave, None if any, and those that they exclude."""
    key = key_of(node)
    only: frozenset[str] | None = None
    never: frozenset[str] = frozenset()
    child: ast.AST = node
    for parent in outline.above(node):
        if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
            body = parent.body if isinstance(parent.body, list) else [parent.body]
            test, is_true = parent.test, any(child is part for part in body)
            if isinstance(test, ast.Compare) and len(test.ops) == 1 and key_of(test.left) == key:
                right, op = test.comparators[0], test.ops[0]
                parts = right.elts if isinstance(right, ast.Tuple | ast.List | ast.Set) else [right]
                names = frozenset(str(constant(p)) for p in parts if isinstance(constant(p), str))
                is_one = isinstance(op, ast.Eq | ast.In)
                if is_one is is_true and (is_one or isinstance(op, ast.NotEq | ast.NotIn)):
                    only = names if only is None else only & names
                elif is_one or isinstance(op, ast.NotEq | ast.NotIn):
                    never |= names
        child = parent
    return only, never


def _field_choices(outline: Outline, name: str) -> frozenset[str]:
    """The values that HfArgumentParser accepts, `field(metadata={"choices": [...]})`; empty if the fields of this name list none."""
    fields = [b.value for b in outline.bindings.get(name, ()) if isinstance(outline.parents.get(b.node), ast.ClassDef)]
    tables = [pairs_of(m) for f in fields if isinstance(f, ast.Call) and (m := argument(f, None, "metadata"))]
    lists = [value for table in tables for key, value in table or () if constant(key) == "choices"]
    choices = [constant(c) for part in lists if isinstance(part, ast.List | ast.Tuple) for c in part.elts]
    is_known = len(lists) == len(fields)
    return frozenset(c for c in choices if isinstance(c, str)) if is_known else frozenset()
