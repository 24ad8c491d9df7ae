"""A loss that is scaled in one branch of an option, while only the other branch opens an autocast region.

if use_bf16:                                  if not use_bf16:
with torch.autocast(...): out = model(x)      scaler.scale(loss).backward()
else:
out = model(x)
"""

from __future__ import annotations

import ast

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event, Guard, compatible
from halfstep.check.script.flow.order import is_amp
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["opposite_region"]

_FORMAT = regex(r"bf16|bfloat16|fp16|float16|half|fp32|float32|precision|dtype")


def opposite_region(script: Script, trace: Trace, index: int) -> tuple[Guard, Event] | None:
    """The condition of a scaled backward whose opposite all regions of its iteration have, and one of these regions."""
    event = trace[index]
    entered = [e for e in trace[:index] if e.kind == "enter_autocast" and e.autocast() and not e.inside("no_grad")]
    entered = [e for e in entered if e.loops == event.loops]
    if not entered or any(compatible(e, event) for e in entered):
        return None
    if any(e.kind == "cast" and e.scaled == "float16" and compatible(e, event) for e in trace):
        return None
    shared = set.intersection(*({g.opposite for g in e.guards} for e in entered))
    flag = next((g for g in event.guards if g in shared and (is_amp(g) or _FORMAT.search(g.text))), None)
    if flag is None or not _computes(script, trace, index, entered[-1], flag):
        return None
    return flag, entered[-1]


def _computes(script: Script, trace: Trace, index: int, opened: Event, flag: Guard) -> bool:
    """Whether the other branch calls the same without a region, and nothing there runs in a context that may be one."""
    event = trace[index]
    forwards = [e for e in trace[:index] if e.kind == "forward" and e.loops == event.loops and compatible(e, event)]
    if any(r.kind != "no_grad" for e in forwards for r in e.regions):
        return False
    called = {key_of(n.func) for n in ast.walk(opened.node) if isinstance(n, ast.Call)} - {""}
    sites = [site for key in called for site in script.outline.calls.get(last_name(key), ())]
    plain = [
        call
        for call, function in sites
        if function is event.function and key_of(call.func) in called and flag in conditions_of(script.outline, call)
    ]
    contexts = (n for call in plain for n in script.above(call) if isinstance(n, (ast.With, ast.AsyncWith)))
    return bool(plain or forwards) and not any(True for _ in contexts)
