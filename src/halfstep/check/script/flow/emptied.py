"""Steps right after the gradients were cleared: nothing between the two computes any."""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import STEPS, later, only_settings
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.script import Script

__all__ = ["stepped_empty"]

_GRADIENTS = ("backward", "owned_backward", "autograd_grad", "grad_read", "handed")
# Calls that may compute gradients themselves.
_COMPUTES = regex(r"backward|grad|train|learn|fit\b|optimi[sz]e\b|step|update|closure|engine|strategy", re.IGNORECASE)


def stepped_empty(script: Script, trace: Trace, index: int) -> Event | None:
    """The step that finds nothing because a zero_grad precedes it: after the last window, or before the batch's backward."""
    event = trace[index]
    following = next(later(trace, index, *_GRADIENTS, *STEPS), None)
    if following is None or trace[following].kind not in {"opt_step", "scaler_step"} or not event.optimizer:
        return None
    use = trace[following]
    is_one_block = event.function is use.function and event.loops == use.loops and event.roots == use.roots
    if not is_one_block or event.optimizer != use.optimizer or not only_settings(script, event, use):
        return None
    call = use.node
    if not isinstance(call, ast.Call) or len(call.args) + len(call.keywords) != (use.kind == "scaler_step"):
        return None  # a closure computes the gradients
    if any(e.kind == "handed" for e in trace) or _may_compute(script, event, use):
        return None
    depth = len(event.loops)
    backs = [(i, e) for i, e in enumerate(trace) if e.kind in _GRADIENTS and e.loops[:depth] == event.loops]
    if any(e.kind not in {"backward", "owned_backward"} for _, e in backs):
        return None
    inner = [i for i, e in backs if len(e.loops) > depth]
    if inner and len(inner) == len(backs) and max(inner) < index:
        return use if _ends_windows(trace, use, depth) else None
    is_later = bool(backs) and not inner and all(i > following and compatible(e, use) for i, e in backs)
    others = {e.optimizer for e in trace if e.kind == "zero_grad"} - {event.optimizer}
    steps = [e for e in trace[following + 1 :] if e.kind in STEPS and e.optimizer == event.optimizer]
    return use if depth and is_later and not others and not steps else None


def _ends_windows(trace: Trace, use: Event, depth: int) -> bool:
    """Whether a step after a loop is for the micro-batches that the windows in the loop left over."""
    inside = [e for e in trace if e.kind in STEPS and e.optimizer == use.optimizer and len(e.loops) > depth]
    return bool(inside) and (use.kind == "scaler_step" or all(e.accumulating for e in inside))


def _may_compute(script: Script, first: Event, last: Event) -> bool:
    """Whether a line between two events calls something that may compute gradients."""
    lines = script.source.text.splitlines()[script.where(first.node).line : script.where(last.node).line - 1]
    return any(_COMPUTES.search(line.partition("#")[0]) for line in lines)
