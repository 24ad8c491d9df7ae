"""Checkpoints without the scaler's state in a script that saves it in another checkpoint.

A checkpoint is a dictionary: written out, the call `dict(optimizer=...)`, a variable that gets its entries one by one, what a
function of the file returns, or what a function that saves receives as `**objects`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import without_amp
from halfstep.check.script.flow.recognise import Recogniser
from halfstep.check.script.objects.saving import is_setting, passed_objects, saves
from halfstep.check.script.objects.values import constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, last_name_of
from halfstep.check.script.syntax.scope import default_of

__all__ = ["checkpoint_of", "incomplete_checkpoints", "is_saved_as_it_is"]

_CHANGES = regex(r"^(update|setdefault|__setitem__)$")  # methods that may add the scaler to a dictionary
_WRITES = {"save", "async_save", "save_on_master"}


def incomplete_checkpoints(script: Script) -> Iterator[tuple[Event, Event]]:
    """Each saved optimizer whose checkpoint has no scaler, with the event that saves one next to the optimizer elsewhere.

    Only in a script that restores both, so that a run can be resumed from either file.
    """
    if script.has("load_optimizer") and script.has("load_scaler"):
        yield from _by_entries(script)
        yield from _by_arguments(script)


def _by_entries(script: Script) -> Iterator[tuple[Event, Event]]:
    scalers = {written: e for e in script.events("save_scaler") if (written := checkpoint_of(script, e)) is not None}
    optimizers = {
        e.node: (e, written) for e in script.events("save_optimizer") if (written := checkpoint_of(script, e))
    }
    complete = [scalers[written] for _, written in optimizers.values() if written in scalers]
    for event, written in optimizers.values() if complete else ():
        is_training = event.loops or saves(event.function.name)
        if (
            written not in scalers
            and is_training
            and not without_amp(event)
            and is_saved_as_it_is(script, written, event)
        ):
            yield event, complete[0]


def _by_arguments(script: Script) -> Iterator[tuple[Event, Event]]:
    """The calls of a function of the file that saves the objects it receives, which pass the optimizer and no scaler."""
    recogniser = Recogniser(script.outline)
    stepped = {e.local.optimizer.removeprefix("self.") for e in script.events("scaler_step")}
    for function in script.outline.functions if script.scalers else ():
        if not _takes_objects(function) or not _saves_itself(script, function):
            continue
        complete: Event | None = None
        others: list[Event] = []
        for call, caller in script.outline.calls.get(function.name, ()):
            if script.outline.call_target(call, caller) is not function:
                continue
            if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
                return
            keys = [key for key in passed_objects(script.outline, call, caller) if not is_setting(key, stepped)]
            kinds = {recogniser.kind_of(key, caller): key for key in keys}
            optimizer, scaler = kinds.get("optimizer", ""), kinds.get("scaler") or kinds.get("wrapper") or ""
            event = Event("save_optimizer", call, caller, scaler=scaler, optimizer=optimizer)
            if optimizer and scaler:
                complete = complete or event
            elif optimizer and any(isinstance(n, ast.For | ast.While) for n in script.above(call)):
                others.append(event)
        if complete is not None:
            yield from ((event, complete) for event in others)


def _takes_objects(function: Function) -> bool:
    """Whether a function has `**objects`, or a parameter for a scaler that a call may leave out."""
    if isinstance(function.node, ast.Module):
        return False
    optional = (name for name in function.params if "scaler" in name.lower())
    return function.node.args.kwarg is not None or any(default_of(function, name) is not None for name in optional)


def _saves_itself(script: Script, function: Function) -> bool:
    return any(f is function for name in _WRITES for _, f in script.outline.calls.get(name, ()))


def checkpoint_of(script: Script, event: Event) -> ast.Dict | ast.Call | None:
    """The dictionary that an event's state is an entry of."""
    child: ast.AST = event.node
    for node in script.above(event.node):
        if isinstance(node, ast.Dict) or (isinstance(node, ast.Call) and key_of(node.func) == "dict" and node.keywords):
            return node
        if isinstance(node, ast.Assign) and child is node.value and isinstance(node.targets[0], ast.Subscript):
            return _started(script, node.targets[0], event)
        child = node
    return None


def _started(script: Script, entry: ast.Subscript, event: Event) -> ast.Dict | ast.Call | None:
    """The dictionary that a function assigns to a variable before it adds entries to it: `state = {}`."""
    key = key_of(entry.value)
    values = [b.value for b in script.outline.bindings.get(key, ()) if b.function is event.function]
    value = values[0] if len(values) == 1 else None
    is_call = isinstance(value, ast.Call) and key_of(value.func) == "dict"
    return value if isinstance(value, ast.Dict) or is_call else None  # type: ignore[return-value]


def is_saved_as_it_is(script: Script, written: ast.expr, event: Event) -> bool:
    """Whether a dictionary goes to a function that saves it, and nothing can add the scaler before."""
    is_open = None in written.keys if isinstance(written, ast.Dict) else _is_open(written)
    parent = script.outline.parents.get(written)
    if isinstance(parent, ast.Call) and not is_open:
        return saves(last_name_of(parent.func))
    if isinstance(parent, ast.Return) and not is_open:
        return _is_result_saved(script, event.function)
    return not is_open and _is_variable_saved(script, written, event.function)


def _is_open(call: ast.expr) -> bool:
    return isinstance(call, ast.Call) and (bool(call.args) or any(k.arg is None for k in call.keywords))


def _is_result_saved(script: Script, function: Function) -> bool:
    """Whether every call of a function saves what it returns, as it is."""
    sites = [s for s in script.outline.calls.get(function.name, ()) if script.outline.call_target(*s) is function]
    for call, caller in sites:
        parent = script.outline.parents.get(call)
        is_argument = isinstance(parent, ast.Call) and call in parent.args and saves(last_name_of(parent.func))
        if not is_argument and not _is_variable_saved(script, call, caller):
            return False
    return bool(sites)


def _is_variable_saved(script: Script, value: ast.expr, function: Function) -> bool:
    """Whether a value is assigned to a variable that is saved, without a use that may add the scaler."""
    parent = script.outline.parents.get(value)
    name = key_of(parent.targets[0]) if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else ""
    uses = [n for n in ast.walk(function.node) if name and key_of(n) == name and isinstance(n, ast.expr)]
    return any(_is_argument_of_save(script, use) for use in uses) and not any(_may_add(script, use) for use in uses)


def _is_argument_of_save(script: Script, use: ast.expr) -> bool:
    call = script.outline.parents.get(use)
    return isinstance(call, ast.Call) and use in call.args and saves(last_name_of(call.func))


def _may_add(script: Script, use: ast.expr) -> bool:
    """Whether a use of a dictionary may add the scaler: an entry of such a name or of a variable's, or a method that adds some."""
    parent = script.outline.parents.get(use)
    if isinstance(parent, ast.Subscript) and parent.value is use and isinstance(parent.ctx, ast.Store):
        key = constant(parent.slice)
        return not isinstance(key, str) or "scal" in key.lower() or "amp" in key.lower()
    if isinstance(parent, ast.Attribute):
        return bool(_CHANGES.search(parent.attr))
    if isinstance(parent, ast.Dict):
        return True  # `{**state, "scaler": ...}`
    return isinstance(parent, (ast.Call, ast.keyword)) and not _is_argument_of_save(script, use)
