"""Checkpoints without the scaler in a script that saves it in others: the best one next to the last one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import without_amp
from halfstep.check.script.objects.saving import saves
from halfstep.check.script.objects.values import constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import last_name_of

__all__ = ["incomplete_checkpoints"]

_CHANGES = regex(r"^(update|setdefault|__setitem__)$")


def incomplete_checkpoints(script: Script) -> Iterator[tuple[Event, Event]]:
    """Each saved optimizer whose dictionary has no scaler, with the event that saves one next to the optimizer elsewhere.

    Only in a script that restores both, so that a run can be resumed from either file.
    """
    if not (script.has("load_optimizer") and script.has("load_scaler")):
        return
    scalers = {written: e for e in script.events("save_scaler") if (written := _dictionary(script, e)) is not None}
    optimizers = {e.node: (e, written) for e in script.events("save_optimizer") if (written := _dictionary(script, e))}
    complete = [scalers[written] for _, written in optimizers.values() if written in scalers]
    for event, written in optimizers.values() if complete else ():
        is_training = event.loops or saves(event.function.name)
        if (
            written not in scalers
            and is_training
            and not without_amp(event)
            and _is_saved_as_it_is(script, written, event)
        ):
            yield event, complete[0]


def _dictionary(script: Script, event: Event) -> ast.Dict | None:
    """The dictionary that an event's state is an entry of."""
    return next((node for node in script.above(event.node) if isinstance(node, ast.Dict)), None)


def _is_saved_as_it_is(script: Script, written: ast.Dict, event: Event) -> bool:
    """Whether a dictionary goes to a function that saves it, and nothing can add the scaler before."""
    if None in written.keys:
        return False
    parent = script.outline.parents.get(written)
    if isinstance(parent, ast.Call):
        return saves(last_name_of(parent.func))
    name = key_of(parent.targets[0]) if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else ""
    uses = [n for n in ast.walk(event.function.node) if name and key_of(n) == name and isinstance(n, ast.expr)]
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
    return isinstance(parent, (ast.Call, ast.keyword)) and not _is_argument_of_save(script, use)
