"""Flags of a training run that are off unless the user asks: options of the command line, and fields that default to False."""

from __future__ import annotations

import ast

from halfstep.check.script.objects.choices import field_defaults
from halfstep.check.script.objects.formats import returned_by
from halfstep.check.script.objects.values import argument, constant
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import default_of

__all__ = ["is_idle"]

_OFF = {False, None}
_DEPTH = 4


def is_idle(outline: Outline, value: ast.expr | None, function: Function, depth: int = _DEPTH) -> bool:
    """Whether a flag is False or None in a run that sets no option: `args.fp16` of a `store_true`, a field `fp16: bool = False`.

    Also through variables, parameters, `bool(...)`, functions of this file, and an object that it creates with it: `Config(fp16=args.fp16)`.
    """
    if value is None or constant(value) in _OFF:
        return True
    if not depth or constant(value) is not ...:
        return False
    if isinstance(value, ast.Call):
        inner = value.args[0] if key_of(value.func) == "bool" and len(value.args) == 1 else None
        is_read = key_of(value.func) == "getattr" and len(value.args) == 3
        read = ast.Attribute(value.args[0], str(constant(value.args[1])), ast.Load()) if is_read else inner
        if read is None:
            target = outline.call_target(value, function)
            if target is None or target.name == "__init__":
                return False
            return all(is_idle(outline, r, target, depth - 1) for r in returned_by(target))
        return is_idle(outline, read, function, depth - 1)
    if isinstance(value, ast.Name):
        sources = [*outline.sources(value.id, function)]
        own = default_of(function, value.id) if value.id in function.params else None
        sources += [(own, function)] if own is not None else []
        return bool(sources) and all(is_idle(outline, v, scope, depth - 1) for v, scope in sources)
    if not isinstance(value, ast.Attribute):
        return False
    declared = _declared(outline, value.attr)
    if declared:
        return all(is_off for is_off in declared)
    if fields := field_defaults(outline, value.attr):
        return all(constant(field) in _OFF for field in fields)
    key = key_of(value.value)
    made = [(v, f) for v, f in outline.sources(key, function) if isinstance(v, ast.Call)] if key else []
    passed = [(k.value, f) for call, f in made for k in call.keywords if k.arg == value.attr]
    return bool(passed) and all(is_idle(outline, v, f, depth - 1) for v, f in passed)


def _declared(outline: Outline, name: str) -> list[bool]:
    """For each option of this name whether it is off by default."""
    states = []
    for call, _ in outline.calls.get("add_argument", ()):
        flags = [str(constant(a)).lstrip("-").replace("-", "_") for a in call.args]
        if name in (*flags, constant(argument(call, None, "dest"))):
            default = argument(call, None, "default")
            action = constant(argument(call, None, "action"))
            states.append(constant(default) in _OFF if default is not None else action != "store_false")
    return states
