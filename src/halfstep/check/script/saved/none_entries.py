"""Entries of checkpoints that exist in every run, with None in place of a state: `"scaler": scaler.state_dict() if scaler else None`."""

from __future__ import annotations

import ast

from halfstep.check.script.flow.creation import tests_entry
from halfstep.check.script.flow.event import Event, Guard
from halfstep.check.script.objects.values import constant
from halfstep.check.script.script import Script

__all__ = ["tests_none_entry"]


def tests_none_entry(script: Script, event: Event, guard: Guard) -> bool:
    """Whether a condition is that a checkpoint has the entry that an event loads, which this script also saves as None."""
    name, _, container = guard.text.partition(" in ")
    if not container or not tests_entry(event, guard):
        return False
    return any(repr(_entry_or_none(script, saved.node)) == name for saved in script.events("save_scaler"))


def _entry_or_none(script: Script, state: ast.AST) -> object:
    """The key of the entry that is a state or None, by a condition; None for any other state."""
    choice = script.outline.parents.get(state)
    if isinstance(choice, ast.IfExp):
        other = choice.orelse if choice.body is state else choice.body
        if constant(other) is not None:
            return None
    elif not isinstance(choice, ast.BoolOp) or not isinstance(choice.op, ast.And):  # `scaler and scaler.state_dict()`
        return None
    owner = script.outline.parents.get(choice)
    if isinstance(owner, ast.Dict):
        keys = [key for key, value in zip(owner.keys, owner.values, strict=True) if value is choice]
        return constant(keys[0]) if keys else None
    if isinstance(owner, ast.keyword):
        return owner.arg
    target = owner.targets[0] if isinstance(owner, ast.Assign) else None
    return constant(target.slice) if isinstance(target, ast.Subscript) else None
