"""Scripts with several scalers of which the checkpoint contains, or restores, only some."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.script.flow.event import Event
from halfstep.check.script.saved.uses import LOADS, SAVES, Uses
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import last_name

__all__ = ["unrestored_scalers", "unsaved_scalers"]


def unsaved_scalers(script: Script, steps: list[Event]) -> Iterator[tuple[ast.AST, Event, str]]:
    """The steps of scalers whose state nothing saves, each with a place that saves another scaler, and that scaler.

    The optimizer that such a scaler steps is saved.
    """
    several = _several(script, steps)
    saved = next(iter(script.events("save_scaler")), None) if several else None
    uses = Uses(script)
    listed = _listed(script, several) if several and saved is None else None
    place, name = (saved.node, saved.scaler) if saved is not None else listed or (None, "")
    if place is None:
        return
    near = {id(e.node) for e in script.near(saved, "scaler_step")} if saved is not None else set()
    for key, step in several.items():
        is_near = saved is None or id(step.node) in near
        is_other = last_name(key) != last_name(name)
        if is_near and is_other and not uses.may(SAVES, key) and _is_kept(uses, step.optimizer):
            yield place, step, name


def unrestored_scalers(script: Script, steps: list[Event]) -> Iterator[tuple[Event, str]]:
    """The steps of scalers whose state is saved and never restored, each with another scaler that is restored."""
    several = _several(script, steps)
    restored = next(iter(script.events("load_scaler")), None) if several else None
    uses = Uses(script)
    for key, step in several.items() if restored is not None else ():
        is_other = restored is not None and last_name(key) != last_name(restored.scaler)
        if is_other and restored is not None and uses.may(SAVES, key) and not uses.may(LOADS, key):
            yield step, restored.scaler


def _several(script: Script, steps: list[Event]) -> dict[str, Event]:
    """The scalers that step an optimizer, each with a step of it, also in one function for all; empty unless there are several."""
    nodes = {id(e.node) for e in steps}
    by_key = {e.scaler: e for e in script.events("scaler_step") if id(e.node) in nodes}
    return by_key if len({last_name(key) for key in by_key}) > 1 else {}


def _listed(script: Script, several: dict[str, Event]) -> tuple[ast.AST, str] | None:
    """The place of the name of a scaler in a collection of names, whose objects are all saved: `getattr(self, name).state_dict()`."""
    names = {last_name(key): key for key in several} if "getattr" in script.outline.calls else {}
    for call, _ in script.outline.calls.get(SAVES, ()) if names else ():
        if isinstance(call.func, ast.Attribute) and "getattr(" in ast.unparse(call.func.value):
            for part in script.above(call):
                constants = (n for n in ast.walk(part) if isinstance(n, ast.Constant))
                listed = next((names[str(n.value)] for n in constants if n.value in names), "")
                if listed:
                    return call, listed
                if isinstance(part, ast.stmt):
                    break
    return None


def _is_kept(uses: Uses, optimizer: str) -> bool:
    """Whether the file may save the state of an optimizer."""
    return bool(optimizer) and uses.may(SAVES, optimizer)
