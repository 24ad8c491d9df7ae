"""Fixes of checkpoints: save and restore the scaler next to the optimizer."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from halfstep.check.finding import Edit, Fix
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import Scaler, constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["scaler_state_fix"]


def scaler_state_fix(script: Script, scalers: list[Scaler]) -> Fix | None:
    """Save and restore the scaler next to the optimizer, in all places at once; None if one of them is not simple."""
    scaler = scalers[0]
    # A scaler that may be None has no state to save.
    if len(scalers) != 1 or not scaler.key or script.outline.parents.get(scaler.node) is not scaler.parent:
        return None
    names: dict[str, str] = {}
    # Of several optimizers in one dictionary or one function, the first carries the scaler with it.
    saves = _first_of(_unique(script.events("save_optimizer")), lambda e: script.outline.parents.get(e.node))
    edits: list[Edit | None] = [_save_edit(script, e, scaler, names) for e in saves]
    loads = [e for e in _unique(script.events("load_optimizer")) if _loaded_key(e) in names or len(saves) == 1]
    edits += [_load_edit(script, e, scaler, names) for e in _first_of(loads, lambda e: e.function)]
    if not loads:
        return None
    complete = [edit for edit in edits if edit is not None]
    if len(complete) != len(edits):
        return None
    return Fix(f"save and restore {scaler.key} with the optimizer", tuple(sorted(complete)))


def _first_of(events: list[Event], group: Callable[[Event], object]) -> list[Event]:
    """The first event of each group."""
    first: dict[object, Event] = {}
    for event in sorted(events, key=lambda e: (getattr(e.node, "lineno", 0), getattr(e.node, "col_offset", 0))):
        first.setdefault(group(event), event)
    return list(first.values())


def _loaded_key(event: Event) -> object:
    """The key of a checkpoint that `optimizer.load_state_dict(checkpoint[key])` reads."""
    call = event.node
    source = call.args[0] if isinstance(call, ast.Call) and call.args else None
    return constant(source.slice) if isinstance(source, ast.Subscript) else None


def _save_edit(script: Script, event: Event, scaler: Scaler, names: dict[str, str]) -> Edit | None:
    """Add the scaler's entry after the optimizer's; `names` maps the optimizer's key to the scaler's."""
    entry = script.outline.parents.get(event.node)
    if not isinstance(entry, ast.Dict):
        return None
    pairs = zip(entry.keys, entry.values, strict=True)
    key, saved = next(((k, v) for k, v in pairs if v is event.node), (None, entry))
    value = constant(key)
    if key is None or not isinstance(value, str):
        return None
    quote = script.lines.source(key)[-1]
    names[value] = quote + (value.replace("optimizer", "scaler") if "optimizer" in value else "scaler") + quote
    text, end = script.lines.text, script.lines.span(saved)[1]
    line_start = script.lines.starts[key.lineno - 1]
    indent = text[line_start : script.lines.span(key)[0]]
    added = f"{names[value]}: {scaler.key}.state_dict()"
    rest = re.match(r",[ \t]*(\r\n|\r|\n)", text[end:])
    if rest and not indent.strip():  # one entry per line, each with its comma
        return Edit(end + 1, end + 1, f"{rest.group(1)}{indent}{added},")
    return Edit(end, end, f", {added}")


def _load_edit(script: Script, event: Event, scaler: Scaler, names: dict[str, str]) -> Edit | None:
    """Load the scaler's state after the optimizer's, if the checkpoint has one."""
    call = event.node
    statement = script.statement(call)
    if not isinstance(call, ast.Call) or not isinstance(statement, ast.Expr) or statement.value is not call:
        return None
    source = call.args[0] if call.args else None
    if not isinstance(source, ast.Subscript) or not isinstance(source.value, (ast.Name, ast.Attribute)):
        return None
    value = constant(source.slice)
    checkpoint = key_of(source.value)
    if not isinstance(value, str) or value not in names or not checkpoint:
        return None
    if not script.lines.alone(statement):
        return None
    # A disabled scaler saves an empty state, which an enabled one rejects.
    name = names[value]
    return script.lines.after(
        statement,
        f"if {checkpoint}.get({name}):\n{script.lines.indent_unit(statement)}{scaler.key}.load_state_dict({checkpoint}[{name}])",
    )


def _unique(events: Iterator[Event]) -> list[Event]:
    return list({event.node: event for event in events}.values())
