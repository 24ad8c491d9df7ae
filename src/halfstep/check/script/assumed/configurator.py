"""Variables that the command line or a file sets: the global ones of nanoGPT and of the scripts after it, and parsed arguments of any name.

dtype = "bfloat16"                                     exec(open("configurator.py").read())
for arg in sys.argv[1:]: globals()[key] = value        globals().update(yaml.safe_load(file))
    a = parser.parse_args()
"""

from __future__ import annotations

import ast

from halfstep.check.script.syntax.outline import Function, Outline, last_name_of

__all__ = ["ANYWHERE", "PARSED", "parsed", "replaceable"]

ANYWHERE = 0  # in place of the line of a function that has a parameter
PARSED = -1  # the same for a variable whose attributes are settings
_PARSES = {"parse_args", "parse_known_args", "parse_intermixed_args"}


def replaceable(outline: Outline) -> frozenset[tuple[int, str]]:
    """The global variables of a file with such a configurator, other than those with the name of a local variable or a parameter."""
    if not _has_configurator(outline):
        return frozenset()
    params = {param for function in outline.functions for param in function.params}
    names = {
        name
        for name, bindings in outline.bindings.items()
        if name.isidentifier() and name not in params and all(b.function is outline.module for b in bindings)
    }
    return frozenset((ANYWHERE, name) for name in names)


def parsed(outline: Outline) -> frozenset[tuple[int, str]]:
    """The variables that only ever have the arguments of the command line: `a = parser.parse_args()`, or the `a` of `main(a)`."""
    if _PARSES.isdisjoint(outline.calls):
        return frozenset()
    readers = _PARSES | {function.name for name in _PARSES for _, function in _returned(outline, name)}
    names = {
        key
        for key, bindings in outline.bindings.items()
        if key.isidentifier() and bindings and all(_is_parsed(b.value, readers) for b in bindings)
    }
    for function in outline.functions:
        for param in function.params:
            passed = list(outline.passed(param, function)) if param not in outline.bindings else []
            if passed and all(_is_parsed(v, readers) or (isinstance(v, ast.Name) and v.id in names) for v, _ in passed):
                names.add(param)
    return frozenset((PARSED, name) for name in names)


def _returned(outline: Outline, name: str) -> list[tuple[ast.Call, Function]]:
    """The calls of a function whose result is returned at once."""
    return [site for site in outline.calls.get(name, ()) if isinstance(outline.parents.get(site[0]), ast.Return)]


def _is_parsed(value: ast.expr | None, readers: set[str]) -> bool:
    return isinstance(value, ast.Call) and last_name_of(value.func) in readers


def _has_configurator(outline: Outline) -> bool:
    executes = [c for c, f in outline.calls.get("exec", ()) if isinstance(c.func, ast.Name) and f is outline.module]
    return bool(executes) or any(_writes(outline, call) for call, _ in outline.calls.get("globals", ()))


def _writes(outline: Outline, call: ast.Call) -> bool:
    """Whether `globals()` is changed: `globals()[key] = value`, `globals().update(...)`."""
    parent = outline.parents.get(call)
    is_entry = isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store)
    return is_entry or (isinstance(parent, ast.Attribute) and parent.attr == "update")
