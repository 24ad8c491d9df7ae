"""Schedules that an engine of ignite advances in each iteration, next to a process function that steps with a scaler.

They are handlers, `trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)`, also a lambda or a decorated function
that calls `scheduler.step()`, or an argument of `setup_common_training_handlers`, which attaches them to each iteration.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.values import argument, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["attached_schedules", "processed_steps"]

_ITERATIONS = regex(r"\bITERATION_(STARTED|COMPLETED)\b")
_SCHEDULES = regex(r"LR$|[sS]chedul|^(PiecewiseLinear|CosineAnnealingWarmRestarts|ReduceLROnPlateau)$")
_NAMED = regex(r"(?<![a-z])(lr_?)?schedul(er|e)s?$|_lr$")
_OTHER = regex(r"['\"](momentum|weight_decay|betas?|eps)['\"]")  # the parameter that a schedule of ignite sets
_SETS_UP = {"setup_common_training_handlers"}


def processed_steps(script: Script, steps: list[Event]) -> list[Event]:
    """The steps in functions that an engine of ignite runs once per iteration: `Engine(train_step)`."""
    if not script.outline.names.uses("ignite"):
        return []
    sites = [site for name in ("Engine", "DeterministicEngine") for site in script.outline.calls.get(name, ())]
    passed = {last_name(key_of(value)) for call, _ in sites for value in arguments_of(call)}
    return [e for e in steps if e.function.name in passed]


def attached_schedules(script: Script) -> Iterator[tuple[ast.expr, str]]:
    """The places where a schedule is attached to the iterations of an engine, each with its name."""
    calls = script.outline.calls
    for call, function in calls.get("add_event_handler", ()):
        event, handler = argument(call, 0, "event_name"), argument(call, 1, "handler")
        if event is None or handler is None or not _ITERATIONS.search(text_of(event)):
            continue
        if isinstance(handler, ast.Lambda):
            stepped = _stepped(handler.body)
            if stepped:
                yield handler, stepped
        elif _is_schedule(script, handler, function):
            yield handler, text_of(handler)
    for name in _SETS_UP:
        for call, function in calls.get(name, ()):
            value = argument(call, None, "lr_scheduler")
            if value is not None and _is_schedule(script, value, function):
                yield value, text_of(value)
    for node in ast.walk(script.tree):
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        if any(_ITERATIONS.search(text_of(d)) for d in decorators):
            for statement in getattr(node, "body", ()):
                if isinstance(statement, ast.Expr) and (stepped := _stepped(statement.value)):
                    yield statement.value, stepped


def _stepped(node: ast.expr) -> str:
    """The schedule of `scheduler.step()`; "" for any other expression."""
    func = node.func if isinstance(node, ast.Call) and not arguments_of(node) else None
    owner = key_of(func.value) if isinstance(func, ast.Attribute) and func.attr == "step" else ""
    return owner if _NAMED.search(owner) else ""


def _is_schedule(script: Script, value: ast.expr, function: Function) -> bool:
    """Whether a value is a schedule of the learning rate, by what creates it, or by its name where another function does."""
    key = key_of(value)
    if not key:
        return False
    created = [v for v in script.outline.values(key, function) if isinstance(v, ast.Call)]
    if any(_OTHER.search(text_of(v)) for v in created):
        return False
    return bool(_NAMED.search(key)) or any(_SCHEDULES.search(last_name(key_of(v.func))) for v in created)
