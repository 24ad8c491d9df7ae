"""What is None: schedules that are never passed, and scalers under some settings, with the conditions without which they are not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.flow.conditions import Conditions
from halfstep.check.script.flow.event import Event, Guard
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.choices import UNKNOWN, devices_of
from halfstep.check.script.objects.values import Scaler, argument, constant, make_scaler
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function
from halfstep.check.script.syntax.scaler_class import is_data_scaler

__all__ = ["Absent", "absent_scalers", "is_always_none", "is_never_passed_none"]


_CLASS = regex(r"^[A-Z]\w*Scaler(?![a-z])")


class Absent(NamedTuple):
    """A scaler that is None unless each of its conditions holds, in one trace."""

    scaler: Scaler
    names: frozenset[str]  # last names of the variables that it is assigned to
    flags: tuple[Guard, ...]
    trace: Trace
    is_created: bool  # the trace creates it: what uses it there runs with the same settings


def absent_scalers(script: Script) -> Iterator[Absent]:
    """Every scaler that is None under some settings, once for each trace that may use it."""
    for scaler in (*script.scalers, *_of_other_classes(script))[:MAX_BINDINGS]:
        names = _names(script, scaler)
        sites = [(scaler.node, scaler.function)]
        if isinstance(script.outline.parents.get(scaler.node), ast.Return):
            sites += list(script.outline.calls.get(scaler.function.name, ()))  # of the function that returns it
        depth = next((i for i, (n, f) in enumerate(sites) if _is_none_otherwise(script, n, scaler.key, f)), None)
        if not names or depth is None:
            continue
        known = _around(script, scaler) if not scaler.api else ()
        created: set[int] = set()
        for number, trace in enumerate(script.traces):
            made = next((e for e in trace if e.kind == "make_scaler" and e.node is scaler.node), None)
            if made is not None:
                known = _own_guards(script, made, depth)
            if made is not None or (not scaler.api and any(e.function is scaler.function for e in trace)):
                created.add(number)
                yield Absent(scaler, names, known, trace, is_created=True)
        for number, trace in enumerate(script.traces):
            if number not in created:
                yield Absent(scaler, names, known, trace, is_created=False)


def _of_other_classes(script: Script) -> Iterator[Scaler]:
    """The scalers of classes of other files, `NativeScaler()`, that are assigned to a variable; no event shows where they are created."""
    outline = script.outline
    for name in outline.calls:
        if not _CLASS.search(name) or is_data_scaler(name):
            continue
        for call, function in outline.calls[name]:
            parent = outline.parents.get(call)
            assigned = outline.parents.get(parent) if isinstance(parent, ast.IfExp) else parent
            target = assigned.targets[0] if isinstance(assigned, ast.Assign) else None
            is_other = make_scaler(outline, call, function) is None and name not in outline.classes
            if is_other and "scaler" in key_of(target).lower() and parent is not None:
                yield Scaler(call, function, key_of(target), "", "yes", parent)


def _around(script: Script, scaler: Scaler) -> tuple[Guard, ...]:
    """The conditions around the call that creates a scaler, in its function."""
    conditions = Conditions(script.outline, scaler.function)
    guards: list[Guard] = []
    child: ast.AST = scaler.node
    for node in script.above(scaler.node):
        if isinstance(node, ast.If | ast.IfExp) and child is not node.test:
            body = node.body if isinstance(node, ast.If) else [node.body]
            guards += conditions.guards(node.test, is_true=child in body)
        child = node
    return tuple(g for g in guards if not _holds_on_each_device(script, g, scaler.function))


def is_always_none(script: Script, event: Event) -> bool:
    """Whether every call in the file passes None for the parameter that an event is about: `train(model, optimizer, None)`."""
    name, function = event.local.subject, event.function
    values = script.outline.sources(name, function) if name in function.params else []
    return bool(values) and all(constant(value) is None for value, _ in values)


def is_never_passed_none(script: Script, event: Event) -> bool:
    """Whether the scaler that an event's conditions test is a parameter, and no call in the file trains with None for it.

    `if scaler is not None and amp` then asks for the mixed precision alone. What other files pass is not known.
    """
    function = event.function
    tested = {part for guard in event.local.guards for part in guard.text.split(" and ")}
    names = [name for name in function.params if name in tested and "scaler" in name.lower()]
    return bool(names) and not any(_is_passed_none(script, name, function) for name in names)


def _is_passed_none(script: Script, name: str, function: Function) -> bool:
    outline = script.outline
    position = function.params.index(name) - (function.method and function.params[0] in {"self", "cls"})
    for call, caller in outline.calls.get(function.name, ()):
        passed = [key_of(value) for value in (*call.args, *(k.value for k in call.keywords))]
        # Evaluation passes no scaler either, and no optimizer.
        trains = any("optim" in key.lower() or key.rsplit(".", 1)[-1] == "opt" for key in passed)
        if not trains or outline.call_target(call, caller) is not function:
            continue
        value = argument(call, position, name)
        if value is None or constant(value) is None:
            return not any(k.arg is None for k in call.keywords)
        sources = outline.sources(key_of(value), caller) if key_of(value) else [(value, caller)]
        if any(not isinstance(v, ast.Call) or make_scaler(outline, v, scope) is None for v, scope in sources):
            return True
    return False


def _own_guards(script: Script, made: Event, depth: int) -> tuple[Guard, ...]:
    """The conditions in the function that creates a scaler, or in its caller, with the names of the caller."""
    own = len(made.local.guards)
    inner = made.guards[len(made.guards) - own :] if own else ()
    guards = inner if not depth else made.guards
    ended = _raising(script, made.function) if guards else frozenset()
    known = tuple(g for g in guards if g not in ended) or _tests_before(script, made)
    return tuple(g for g in known if not _holds_on_each_device(script, g, made.function))


def _holds_on_each_device(script: Script, guard: Guard, function: Function) -> bool:
    """Whether a test always holds, as one of the device that is true for each that the file chooses: `device.type in ("cuda", "cpu")`."""
    if guard.text == "True":  # `if True:`
        return guard.is_true
    subject = guard.text.partition(" ")[0]
    if subject == guard.text or not subject.replace(".", "").isidentifier():
        return False
    devices = devices_of(script.outline, ast.parse(subject, mode="eval").body, function)
    chosen = (Guard(f"{subject} == {device!r}", is_true=True) for device in devices)
    return UNKNOWN not in devices and not any(possible((guard.opposite,), (one,)) for one in chosen)


def _raising(script: Script, function: Function) -> frozenset[Guard]:
    """The conditions without which a function raises: a run without them has no scaler, nor anything else."""
    tests = [n for n in ast.walk(function.node) if isinstance(n, ast.If) and isinstance(n.body[-1], ast.Raise)]
    conditions = Conditions(script.outline, function)
    return frozenset(guard for node in tests for guard in conditions.guards(node.test, is_true=False))


def _tests_before(script: Script, made: Event) -> tuple[Guard, ...]:
    """The conditions `a` and `b` of `a and b and GradScaler()`."""
    parent = script.outline.parents.get(made.node)
    tests = parent.values[:-1] if isinstance(parent, ast.BoolOp) else []
    conditions = Conditions(script.outline, made.function)
    return tuple(guard for test in tests for guard in conditions.guards(test, is_true=True))


def _is_none_otherwise(script: Script, node: ast.AST, key: str, function: Function) -> bool:
    """Whether a scaler's variable is None wherever the scaler is not created, by a call or by the function that it calls."""
    parent = script.outline.parents.get(node)
    if isinstance(parent, ast.IfExp) and node in (parent.body, parent.orelse):
        other = parent.orelse if parent.body is node else parent.body
        return constant(other) is None
    if isinstance(parent, ast.Return):
        return _returns_none(function)
    if isinstance(parent, ast.BoolOp):
        return isinstance(parent.op, ast.And) and parent.values[-1] is node  # `amp and GradScaler()`
    bindings = script.outline.lookup(key, function) if key else []
    others = [b for b in bindings if b.value is not node]
    if "." in key and not others:  # a default in the body of the class
        body = script.outline.bindings.get(key.rsplit(".", 1)[-1], ())
        classes = [(b, script.outline.parents.get(b.node)) for b in body]
        others = [b for b, c in classes if isinstance(c, ast.ClassDef) and _is_of(key, function, c)]
    return bool(others) and all(b.index is None and b.value is not None and constant(b.value) is None for b in others)


def _is_of(key: str, function: Function, cls: ast.ClassDef) -> bool:
    """Whether an attribute may be one of a class: of `self` only that of its own class."""
    return cls.name == function.cls or not key.startswith("self.")


def _returns_none(function: Function) -> bool:
    """Whether a function that returns a scaler returns None on its other paths, and nothing else."""
    values = [node.value for node in ast.walk(function.node) if isinstance(node, ast.Return)]
    others = [value for value in values if not isinstance(value, ast.Call)]
    is_open = not isinstance(function.body[-1], (ast.Return, ast.If, ast.Raise)) if function.body else True
    plain = all(value is None or constant(value) is None for value in others)
    return plain and len(values) - len(others) == 1 and (bool(others) or is_open or _lacks_else(function))


def _lacks_else(function: Function) -> bool:
    last = function.body[-1]
    return isinstance(last, ast.If) and not last.orelse


def _names(script: Script, scaler: Scaler) -> frozenset[str]:
    """The last names of a scaler's variable, and of those that receive it from the function that creates it."""
    names = {scaler.key.rsplit(".", 1)[-1]} if scaler.key else set()
    function = scaler.function
    positions = {
        index
        for node in ast.walk(function.node)
        if scaler.key and isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
        for index, value in enumerate(node.value.elts)
        if key_of(value) == scaler.key
    }
    for call, caller in script.outline.calls.get(function.name, ()) if positions else ():
        statement = script.outline.parents.get(call)
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(target, ast.Tuple) and script.outline.call_target(call, caller) is function:
            names |= {key_of(e).rsplit(".", 1)[-1] for i, e in enumerate(target.elts) if i in positions}
    return frozenset(names - {""})
