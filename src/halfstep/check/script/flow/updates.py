"""Whether a scaler is updated as often as it steps."""

from __future__ import annotations

import ast

from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import changes_in_loop, implied, is_setting, only_settings, switched_off
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.script import Script

__all__ = ["owns_loop", "seldom_updated"]


def seldom_updated(script: Script, trace: Trace, index: int) -> str:
    """Why the updates of a scaler come less often than this step of one optimizer; "" if they do not, or may not."""
    event = trace[index]
    updates = [e for e in trace if e.kind == "update" and e.scaler == event.scaler]
    others = any(e.kind == "handed" and e.scaler == event.scaler for e in trace)
    if not updates or others or not event.loops or switched_off(script, event) or changes_in_loop(script, event):
        return ""
    if not any(e.kind == "backward" and e.scaled == "yes" and e.loops == event.loops for e in trace[:index]):
        return ""
    inside = [e for e in updates if e.loops[: len(event.loops)] == event.loops]
    if not inside:
        line = max(getattr(e.node, "lineno", 0) for e in updates)
        return f"in the loop at line {event.loops[-1].line}, without `update()`, which follows the loop (line {line})"
    if all(_sets_scale(script, event, e) for e in inside):
        lines = ", ".join(str(e.node.lineno) for e in inside if isinstance(e.node, ast.Call))
        return f"without `update()`: only a scale is set under a condition (line {lines})"
    if not any(compatible(e, event) for e in inside):
        apart = all(only_settings(script, e, event) and only_settings(script, event, e) for e in inside)
        return "without `update()`, which only the other branch calls" if apart else ""
    extra = [next((g for g in e.accumulating if g not in event.guards), None) for e in inside]
    if not all(extra) or extra[0] is None or not all(implied(event, e) for e in inside):
        return ""
    return f"without `update()` unless `{extra[0].text}`"


def _sets_scale(script: Script, step: Event, update: Event) -> bool:
    """Whether an update forces a scale in some iterations: `if scale < 1: scaler.update(1.0)`."""
    is_forced = isinstance(update.node, ast.Call) and bool(update.node.args or update.node.keywords)
    return is_forced and any(g not in step.guards and not is_setting(script, g, update) for g in update.guards)


def owns_loop(script: Script, trace: Trace, step: Event) -> bool:
    """Whether a function that receives a scaler scales the loss and steps with it, as no other function of the file does."""
    scaled = [e for e in trace if e.kind == "backward" and e.scaled == "yes" and e.scaler == step.scaler]
    others = {e.node for e in script.events("scaler_step", "owned_step", "update")} - {step.node}
    outermost = step.roots[0] if step.roots else step.node
    root = next((n for n in script.above(outermost) if isinstance(n, ast.FunctionDef)), None)
    params = [p.arg for p in (*root.args.args, *root.args.kwonlyargs)] if root is not None else []
    return any(e.function is step.function for e in scaled) and step.scaler in params and not others
