"""Whether a scaler is updated as often as it steps."""

from __future__ import annotations

from halfstep.check.script.flow.event import compatible
from halfstep.check.script.flow.order import changes_in_loop, implied, only_settings, switched_off
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.script import Script

__all__ = ["seldom_updated"]


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
    if not any(compatible(e, event) for e in inside):
        apart = all(only_settings(script, e, event) and only_settings(script, event, e) for e in inside)
        return "without `update()`, which only the other branch calls" if apart else ""
    extra = [next((g for g in e.accumulating if g not in event.guards), None) for e in inside]
    if not all(extra) or extra[0] is None or not all(implied(event, e) for e in inside):
        return ""
    return f"without `update()` unless `{extra[0].text}`"
