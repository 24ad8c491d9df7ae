"""Accumulation windows: which step ends the window of a line that runs on every micro-batch.

A window is written in two ways. In one loop over micro-batches the step waits, by a count (`(i + 1) % n == 0`) or by a flag
that the caller computes. With a loop over the micro-batches of one step, the step comes after that inner loop.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import STEPS, later, loops_around, only_settings
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script

__all__ = ["ACCUMULATION", "Window", "accumulated_over", "targets_of", "window_of"]

# Names of the number of micro-batches.
ACCUMULATION = re.compile(
    r"accum|acc_|_acc|virtual|subdivision|batch_split|micro|iter_size|grad_steps|update_freq", re.IGNORECASE
)
_MODULO = re.compile(r"%\s*([A-Za-z_][\w.\[\]'\"]*|\d+)")
_REACHED = re.compile(r"(?:==|>=) ([A-Za-z_][\w.\[\]'\"]*)$")  # the number that a counter has to reach
_FINITE = re.compile(r"finite|nan|inf", re.IGNORECASE)  # a test of the gradients, not of the window
_COUNTER = re.compile(r"(==|>=) [A-Za-z_]")  # `count == accumulate`, `count >= accumulate`


@dataclass(frozen=True)
class Window:
    """An accumulation window: the step that ends it, and when that step runs."""

    step: Event
    ends: str  # in words: `(i + 1) % n == 0`, or the end of a loop
    length: str = ""  # the number of micro-batches, as the script writes it

    @property
    def line(self) -> int:
        """The line of the step."""
        return int(getattr(self.step.node, "lineno", 0))


def window_of(script: Script, trace: Trace, index: int) -> Window | None:
    """The window of an event that runs on every micro-batch; None if it runs as often as the step, or that is unclear."""
    event = trace[index]
    steps = [e for e in trace if e.kind == "scaler_step" and e.scaler == event.scaler]
    steps = [e for e in steps if e.loops == event.loops[: len(e.loops)] and compatible(e, event)]
    if not steps:
        return None
    here = [e for e in steps if e.loops == event.loops]
    if not here:
        return _inner_window(script, trace, index, steps)
    windows = [
        Window(e, f"`{end}`" if (end := _end(script, e, event)) else "")
        for e in here
        if only_settings(script, event, e)
    ]
    return windows[0] if windows and len(windows) == len(here) and all(w.ends for w in windows) else None


def _end(script: Script, step: Event, event: Event) -> str:
    """The condition, not shared with `event`, by which a step waits for the end of a window."""
    for guard in step.accumulating:
        text = guard.text
        if guard in event.guards:
            continue  # around both, or a check of the settings far above
        if step.loops and ("%" in text or _COUNTER.search(text)):
            return text
        if not step.loops:  # a flag in a method that is called once per batch
            values = script.outline.values(text, step.function) if text.replace(".", "").isidentifier() else []
            if not any(_FINITE.search(text_of(value)) for value in values):
                return text
    return ""


def _inner_window(script: Script, trace: Trace, index: int, steps: list[Event]) -> Window | None:
    """The window of an event in a loop over micro-batches, with the step after that loop."""
    event = trace[index]
    following = {id(trace[i]) for i in later(trace, index, "scaler_step")}
    after = [e for e in steps if id(e) in following]
    if not after or len(after) != len(steps) or not only_settings(script, event, after[0]):
        return None
    depth = len(after[0].loops)
    inner = event.loops[: depth + 1]
    loops = loops_around(script, event)
    if len(loops) != len(event.loops) or any(
        e.loops[: depth + 1] == inner for e in trace if e.kind in {*STEPS, "handed"}
    ):
        return None
    backs = [e for e in trace if e.kind == "backward" and e.scaled == "yes" and e.loops[: depth + 1] == inner]
    loop = loops[depth]
    if not backs or not isinstance(loop, ast.For) or any(isinstance(n, ast.Break) for n in ast.walk(loop)):
        return None
    if set(re.findall(r"\w+", event.local.optimizer)) & set().union(*map(targets_of, loops[depth:])):
        return None  # a loop over optimizers
    return Window(after[0], f"the loop at line {loop.lineno} ends")


def targets_of(loop: ast.AST) -> set[str]:
    """The variables that a `for` loop assigns."""
    target = getattr(loop, "target", None)
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)} if target is not None else set()


def accumulated_over(script: Script, trace: Trace, index: int) -> Window | None:
    """The window over which the gradients of a backward accumulate, with its length."""
    event = trace[index]
    following = next(later(trace, index, *STEPS), None)
    step = trace[following] if following is not None else None
    if step is None or step.kind == "owned_step" or any(g not in step.guards for g in event.accumulating):
        return None
    if step.loops != event.loops:
        return _counted_loop(script, event, step)
    for guard in step.accumulating:
        length = "" if guard in event.guards else _length(script, guard.text)
        if length:
            return Window(step, f"`{guard.text}`", length)
    return None


def _length(script: Script, text: str) -> str:
    """The window length in a condition: `accumulation_steps` in `(i + 1) % accumulation_steps == 0`."""
    bound = script.outline.bindings.get(text, ())  # a flag that a caller computes and passes
    value = bound[0].value if len(bound) == 1 and bound[0].index is None else None
    match = _MODULO.search(text) or _MODULO.search(text_of(value))
    if match:
        return match.group(1)
    reached = _REACHED.search(text)
    return reached.group(1) if reached and ACCUMULATION.search(reached.group(1)) else ""


def _counted_loop(script: Script, event: Event, step: Event) -> Window | None:
    """The window of a backward inside `for micro in range(n)`, with the step after that loop."""
    depth, loops = len(step.loops), loops_around(script, event)
    if event.loops[:depth] != step.loops or len(loops) != len(event.loops) or len(loops) != depth + 1:
        return None
    loop = loops[depth]
    call = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(call, ast.Call) or text_of(call.func) not in {"range", "trange"} or len(call.args) != 1:
        return None
    length = text_of(call.args[0])
    if not (ACCUMULATION.search(length) or any(map(ACCUMULATION.search, targets_of(loop)))):
        return None
    if any(isinstance(n, ast.Slice) and (n.lower is None) != (n.upper is None) for n in ast.walk(loop)):
        return None  # `cached[:j] + [x] + cached[j + 1:]`: one loss over the entire window, as with cached features
    return Window(step, f"the loop at line {loop.lineno} ends", length)
