"""An autocast object that is entered while it is active, which loses the state that its outer block restores.

    ctx = torch.autocast("cuda", dtype=torch.bfloat16)       evaluate():
    with ctx:                                                    with ctx:
        evaluate()                                                   model(x)

The object stores one previous state. A call of `torch.autocast(...)` in each `with` creates an object of its own. A decorator is one object
for all calls of its function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event, Region
from halfstep.check.script.flow.order import function_around
from halfstep.check.script.objects.expressions import arguments_of, arms_of
from halfstep.check.script.objects.values import AUTOCASTS
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["Reentered", "reentered"]

MAX_DEPTH = 3  # copies and parameters between an object and a region
_LATER = regex(r"regist|hook|add|append|callback|submit|thread|process|partial|wrap|compile|prepare")
_WORD = regex(r"\w+")
_WITHS = (ast.With, ast.AsyncWith)


class Reentered(NamedTuple):
    """Where an object is entered again, its name there, and the place that has entered it before."""

    node: ast.AST
    name: str
    outer: ast.AST
    through: str = ""  # the function that a call of another file receives and runs


def reentered(script: Script) -> Iterator[Reentered]:
    """The regions and decorated functions that enter an object again, once for each place."""
    events = [e for e in script.events("enter_autocast", "enter_function") if _own(e) is not None]
    places: dict[ast.AST, Reentered] = {}
    for event in events:
        if (again := _again(script, event)) is not None:
            places.setdefault(again.node, again)
    for event in events:
        for again in _through_calls(script, event, events) if event.kind == "enter_autocast" else ():
            places.setdefault(again.node, again)
    for function in script.outline.functions:
        if (again := _recursive(script, function)) is not None:
            places.setdefault(again.node, again)
    yield from places.values()


def _own(event: Event) -> Region | None:
    """The region that an event enters."""
    return next((r for r in reversed(event.regions) if r.kind == "autocast"), None)


def _again(script: Script, event: Event) -> Reentered | None:
    """The place of an event whose innermost region outside its own is of the same object."""
    own = _own(event)
    around = [r for r in event.regions if r is not own and r.kind in {"autocast", "owned"}]
    if own is None or not around or around[-1].kind != "autocast" or _is_off(own):
        return None
    outer = around[-1]
    made, name = _object(script, own.node, event.function), key_of(own.node)
    if made is None or made is not _object(script, outer.node, _function_of(script, outer.node)):
        return None
    roots = _inside(script, outer.node, event)
    if name.startswith("self.") and not all(key_of(r.func).count(".") < 2 for r in roots if isinstance(r, ast.Call)):
        return None  # the method of another object, with a `self` of its own
    return Reentered(own.node, name, outer.node) if _is_unconditional(event, outer) else None


def _inside(script: Script, outer: ast.AST, event: Event) -> list[ast.AST]:
    """The calls inside a region that led to an event."""
    block = script.statement(outer)
    inside = (n for n, root in enumerate(event.roots) if any(above is block for above in script.above(root)))
    return list(event.roots[next(inside, len(event.roots)) :])


def _is_off(region: Region) -> bool:
    """Whether a region switches autocast off: what it restores is off as well."""
    return any(a.enabled == "no" for a in region.autocasts)


def _is_unconditional(event: Event, outer: Region) -> bool:
    """Whether an inner region has no condition on autocast itself, or on a parameter that the outer block may pass."""
    extra = [g for g in event.guards if g not in outer.guards]
    words = {word for g in extra for word in _WORD.findall(g.text)}
    return not words & set(event.function.params) and not any("autocast" in g.text for g in extra)


def _function_of(script: Script, node: ast.AST) -> Function:
    around = function_around(script, node)
    return next((f for f in script.outline.functions if f.node is around), script.outline.module)


def _object(script: Script, node: ast.AST, function: Function, depth: int = MAX_DEPTH) -> ast.AST | None:
    """The one assignment that creates the object which a variable has; None where each use may have an object of its own."""
    outline, key = script.outline, key_of(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
    if not key or not depth:
        return None
    if key in function.params and function.node not in outline.by_function(key):
        made = {_object(script, value, caller, depth - 1) for value, caller in outline.passed(key, function)}
        return made.pop() if len(made) == 1 else None
    bound = outline.lookup(key, function) if key.isidentifier() or key.startswith("self.") else []
    value = bound[0].value if len(bound) == 1 and bound[0].index is None else None
    if value is None:
        return None
    binding, scope = bound[0], function
    while key.isidentifier() and scope is not binding.function:
        if scope.parent is None:
            return None  # a variable of the same name in another function
        scope = scope.parent
    if any(isinstance(arm, ast.Call) and outline.names.full(arm.func) in AUTOCASTS for arm in arms_of(value)):
        return binding.node
    return _object(script, value, binding.function, depth - 1)


def _through_calls(script: Script, event: Event, events: list[Event]) -> Iterator[Reentered]:
    """The regions of functions that a call inside a region receives, to run them there."""
    own, block = _own(event), event.node
    made = _object(script, own.node, event.function) if own is not None and isinstance(block, _WITHS) else None
    if own is None or made is None or _is_off(own):
        return
    inner = [e for e in events if e.function is not event.function and e.kind == "enter_autocast" and e.function.name]
    names = {e.function.name: e for e in inner}
    for call in ast.walk(ast.Module([*block.body], [])) if names else ():  # type: ignore[attr-defined]
        if not isinstance(call, ast.Call) or _LATER.search(last_name(key_of(call.func)).lower()):
            continue
        for value in arguments_of(call):
            passed = names.get(last_name(key_of(value)))
            region = _own(passed) if passed is not None else None
            if passed is None or region is None or not _runs(script, call, value, event.function):
                continue
            if _object(script, region.node, passed.function) is made and not passed.guards:
                yield Reentered(region.node, key_of(region.node), own.node, passed.function.name)


def _runs(script: Script, call: ast.Call, value: ast.expr, function: Function) -> bool:
    """Whether a call may run a function that it receives: one of this file does if it calls that parameter."""
    target = script.outline.call_target(call, function)
    if target is None:
        return True
    params = target.params[bool(target.method) :]
    names = {name for name, passed in zip(params, call.args, strict=False) if passed is value}
    names |= {k.arg for k in call.keywords if k.value is value and k.arg}
    called = (n.func for n in ast.walk(target.node) if isinstance(n, ast.Call))
    return any(isinstance(func, ast.Name) and func.id in names for func in called)


def _recursive(script: Script, function: Function) -> Reentered | None:
    """The call of a decorated function in itself."""
    for decorator in getattr(function.node, "decorator_list", ()):
        region = script.outline.names.full(decorator.func) if isinstance(decorator, ast.Call) else ""
        if region not in AUTOCASTS or any(a.node is decorator and a.enabled == "no" for a in script.autocasts):
            continue
        for call, caller in script.outline.calls.get(function.name, ()):
            is_plain = key_of(call.func) in {function.name, f"self.{function.name}"}
            if caller is function and is_plain and script.outline.call_target(call, caller) is function:
                return Reentered(call, f"@{ast.unparse(decorator.func)}", decorator, function.name)
    return None
