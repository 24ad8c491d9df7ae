"""What a script passes to `prepare` of an Accelerator or `setup` of a Fabric, whose scaler unscales only those optimizers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.choices import text_of
from halfstep.check.script.objects.engines import ACCELERATE, FABRIC, engine_at
from halfstep.check.script.objects.expressions import arms_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["Prepared", "prepared_for", "prepared_in", "stays_in"]

_PREPARES = {ACCELERATE: ("prepare", "prepare_optimizer"), FABRIC: ("setup", "setup_optimizers")}
_ADDS = {"append", "extend", "insert"}
_OPTIMIZERS = regex(r"opt", re.IGNORECASE)
_SCHEDULES = regex(r"schedul|^get_\w+_schedule\w*$|LR$|^print$|^len$")


@dataclass(frozen=True)
class Prepared:
    """What a script passes to `prepare` or `setup`, by the last names of the variables."""

    names: frozenset[str]
    is_complete: bool  # every argument is a plain variable


@lru_cache(maxsize=8)
def _prepare_calls(script: Script, library: str) -> tuple[tuple[Function, Prepared], ...]:
    """What each call of `prepare` or `setup` is passed and returns, with the function that contains it."""
    calls = []
    for method in _PREPARES[library]:
        for call, function in script.outline.calls.get(method, ()):
            owner = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            engine = engine_at(script, owner, function) if owner else None
            if engine is None or engine.library != library:
                continue
            passed = [*call.args, *(k.value for k in call.keywords)]
            spreads = [part for argument in passed for part in _spread(script.outline, argument, function)]
            arguments = [part for part in spreads if part is not None]
            parent = script.outline.parents.get(call)
            targets = parent.targets if isinstance(parent, ast.Assign) else []
            parts = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
            names = {last_name(key_of(part)) for part in (*arguments, *parts)} - {"", "_"}
            # `loader = prepare(make_loader())`: what the call prepares has the name of its target.
            is_named = len(parts) == len(arguments) and all(map(key_of, parts))
            is_plain = all(key_of(a) or isinstance(a, ast.Constant) or (is_named and _makes(a)) for a in arguments)
            is_plain &= None not in spreads and not any(isinstance(t, ast.Starred) for t in parts)
            calls.append((function, Prepared(frozenset(names), is_plain)))
    return tuple(calls)


def _spread(outline: Outline, argument: ast.expr, function: Function) -> Iterator[ast.expr | None]:
    """The argument itself, or the elements of `*parts` that a function shows; None stands for those that it does not."""
    if not isinstance(argument, ast.Starred):
        yield argument
        return
    source = argument.value
    is_values = isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and source.func.attr == "values"
    source = source.func.value if is_values and isinstance(source, ast.Call) else source  # type: ignore[attr-defined]
    name = key_of(source)
    if not name:
        yield from _elements(source)
        return
    bound = outline.by_function(name).get(function.node, []) if name.isidentifier() else []
    if not bound:
        yield None
    for binding in bound:
        yield from _elements(binding.value)
    for node in ast.walk(function.node):
        if isinstance(node, ast.AugAssign) and key_of(node.target) == name:
            yield from _elements(node.value)
    for method in sorted(_ADDS):
        for call, inner in outline.calls.get(method, ()):
            if inner is function and isinstance(call.func, ast.Attribute) and key_of(call.func.value) == name:
                added = call.args[-1] if call.args else None
                yield from _elements(added) if method == "extend" else (added,)


def _elements(value: ast.expr | None) -> Iterator[ast.expr | None]:
    """The elements of a list, tuple or dictionary that is written in place, also of a choice and a sum of several."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        yield from (*_elements(value.left), *_elements(value.right))
        return
    for arm in arms_of(value) if value is not None else ():
        if isinstance(arm, ast.Dict):
            yield from arm.values
        elif isinstance(arm, (ast.List, ast.Tuple)):
            yield from (None if isinstance(e, ast.Starred) else e for e in arm.elts)
        else:
            yield None
    if value is None:
        yield None


def _makes(argument: ast.expr) -> bool:
    """Whether an argument is a call that only makes the object: it receives no other that could be prepared with it."""
    values = [*argument.args, *(k.value for k in argument.keywords)] if isinstance(argument, ast.Call) else []
    return isinstance(argument, ast.Call) and not any(_OPTIMIZERS.search(text_of(value)) for value in values)


def prepared_for(script: Script, library: str, event: Event) -> Prepared:
    """What `prepare` of Accelerate or `setup` of Fabric returns, as far as an event can use it.

    The call is in the event's function, in one around it, in a caller, in a method of the same class, or in a helper
    that returns the result to one of these.
    """
    outline = script.outline
    scope = {outline.module}
    function: Function | None = event.function
    while function is not None:
        scope.add(function)
        function = function.parent
    for root in event.roots:
        name = last_name(key_of(root.func)) if isinstance(root, ast.Call) else ""
        scope |= {caller for call, caller in outline.calls.get(name, ()) if call is root}
    near = [
        prepared
        for function, prepared in _prepare_calls(script, library)
        if function in scope
        or (function.cls and function.cls == event.function.cls)
        or (_returns(function, prepared.names) and any(c in scope for _, c in outline.calls.get(function.name, ())))
    ]
    return Prepared(frozenset().union(*(p.names for p in near)), all(p.is_complete for p in near))


def prepared_in(script: Script, library: str, function: Function) -> Prepared:
    """What one function passes to `prepare` or `setup`."""
    own = [prepared for caller, prepared in _prepare_calls(script, library) if caller is function]
    return Prepared(frozenset().union(*(p.names for p in own)), all(p.is_complete for p in own))


@lru_cache(maxsize=64)
def _returns(function: Function, names: frozenset[str]) -> bool:
    """Whether a function returns any of these variables."""
    returned = (n.value for n in ast.walk(function.node) if isinstance(n, ast.Return) and n.value is not None)
    return any(last_name(key_of(part)) in names for value in returned for part in ast.walk(value))


@lru_cache(maxsize=64)
def stays_in(script: Script, key: str, function: Function) -> bool:
    """Whether a variable is created in a function and leaves it for schedulers only, so that nothing elsewhere prepares it."""
    own = script.outline.by_function(key).get(function.node, ()) if key.isidentifier() else ()
    if not own or function is script.outline.module or any(not isinstance(b.value, ast.Call) for b in own):
        return False
    parents = script.outline.parents
    for node in ast.walk(function.node):
        if isinstance(node, (ast.Global, ast.Nonlocal)) and key in node.names:
            return False
        parent = parents.get(node)
        if not isinstance(node, ast.Name) or node.id != key or isinstance(node.ctx, ast.Store):
            continue
        while isinstance(parent, ast.keyword):
            parent = parents.get(parent)
        is_scheduled = isinstance(parent, ast.Call) and _SCHEDULES.search(last_name(key_of(parent.func)))
        if not isinstance(parent, ast.Attribute) and not is_scheduled:
            return False
    return True
