"""The objects whose state a handler of ignite writes: `Checkpoint(to_save, saver)`, `add_event_handler(event, handler, to_save)`.

A dictionary of objects, the engine, model and optimizer among them, is passed as `to_save`; the handler calls `state_dict` of each.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.recognise import Recogniser
from halfstep.check.script.objects.values import argument
from halfstep.check.script.scaling.attached_schedules import processed_steps
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["ATTACHED", "attached_states"]

ATTACHED = "attached_optimizer"  # the kind of these events, which no trace has

_HANDLERS = {"Checkpoint": 0, "ModelCheckpoint": 99, "setup_common_training_handlers": 2, "add_event_handler": 2}


def attached_states(script: Script, steps: list[Event]) -> Iterator[Event]:
    """The optimizer of each such dictionary that has no scaler, with the scaler of the function that the engine runs."""
    processed = processed_steps(script, steps)
    if not processed:
        return
    recogniser = Recogniser(script.outline)
    reported: set[ast.Dict] = set()
    for name, position in _HANDLERS.items():
        for call, function in script.outline.calls.get(name, ()):
            objects = argument(call, position, "to_save")
            for written, scope in _written(script, objects, function):
                pairs = [(key_of(v), v) for k, v in zip(written.keys, written.values, strict=True) if k is not None]
                kinds = {recogniser.kind_of(key, scope): (key, value) for key, value in pairs if key}
                if written in reported or None in written.keys or "optimizer" not in kinds or "scaler" in kinds:
                    continue
                reported.add(written)
                key, value = kinds["optimizer"]
                yield Event(ATTACHED, value, scope, scaler=processed[0].scaler, optimizer=key)


def _written(script: Script, objects: ast.expr | None, function: Function) -> Iterator[tuple[ast.Dict, Function]]:
    """The dictionary that an argument is, unless entries are added to it later."""
    key = key_of(objects) if objects is not None else ""
    if isinstance(objects, ast.Dict):
        yield objects, function
    elif key and not any(added.startswith(f"{key}[") for added in script.outline.bindings):
        sources = script.outline.sources(key, function)
        yield from ((value, scope) for value, scope in sources if isinstance(value, ast.Dict))
