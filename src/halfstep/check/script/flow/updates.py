"""Whether a scaler is updated as often as it steps, or between the steps of two optimizers, and whether it is torch's."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from halfstep.check.script.flow.event import Event, Loop, compatible, is_accumulation
from halfstep.check.script.flow.order import (
    changes_in_loop,
    earlier,
    implied,
    is_setting,
    later,
    loops_around,
    only_settings,
    repeats,
    switched_off,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.engines import ACCELERATE, Engine
from halfstep.check.script.objects.values import constant
from halfstep.check.script.scaling.prepared import prepared_for
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["is_passed_in", "owns_loop", "seldom_updated", "shows_all_uses", "updated_since"]

_PROTOCOL = {"backward", "scaler_step", "update"}


def is_passed_in(script: Script, trace: Trace, event: Event) -> bool:
    """Whether no line here creates the scaler of an event, but its loop calls scale, step and update as torch's needs them."""
    last = event.scaler.rsplit(".", 1)[-1]
    bound = [b for key, bs in script.outline.bindings.items() if key.rsplit(".", 1)[-1] == last for b in bs]
    values = [b.value for b in bound if b.value is not None]
    if any(isinstance(node, ast.Call) for value in values for node in ast.walk(value)):
        return False
    around = [e for e in trace if e.function is event.function and e.loops[:1] == event.loops[:1]]
    used = [e for e in around if e.scaler == event.scaler]
    return {e.kind for e in used if e.kind != "backward" or e.scaled == "yes"} >= _PROTOCOL


def seldom_updated(script: Script, trace: Trace, index: int) -> str:
    """Why the updates of a scaler come less often than this step of one optimizer; "" if they do not, or may not."""
    event = trace[index]
    updates = [e for e in trace if e.kind == "update" and e.scaler == event.scaler]
    if loop := _left_stepped(trace, index, updates):
        return f"after the loop at line {loop.line} without `update()`, and so does the next step in the loop"
    others = any(e.kind == "handed" and e.scaler == event.scaler for e in trace)
    if not updates or others or not event.loops or switched_off(script, event) or changes_in_loop(script, event):
        return ""
    if not any(e.kind == "backward" and e.scaled == "yes" and e.loops == event.loops for e in trace[:index]):
        return ""
    inside = [e for e in updates if e.loops[: len(event.loops)] == event.loops]
    if not inside:
        if _runs_once(script, event):
            return ""
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


def _runs_once(script: Script, event: Event) -> bool:
    """Whether the loop around an event has one iteration: `for _ in range(d_steps)` with the constant `d_steps = 1`."""
    loops = loops_around(script, event)
    source = loops[-1].iter if loops and isinstance(loops[-1], (ast.For, ast.AsyncFor)) else None
    if not isinstance(source, ast.Call) or key_of(source.func) != "range" or len(source.args) != 1:
        return False
    size = source.args[0]
    if isinstance(size, ast.Name):
        is_parameter = any(size.id in function.params for function in script.outline.functions)
        values = [] if is_parameter else script.outline.values(size.id, event.function)
    else:
        values = [size]
    return len(values) == 1 and constant(values[0]) == 1


def _left_stepped(trace: Trace, index: int, updates: list[Event]) -> Loop | None:
    """The loop that updates after its own steps, where this step for the micro-batches left over has no update."""
    event, depth = trace[index], len(trace[index].loops)
    if not repeats(event) or not updates or not any(map(is_accumulation, event.guards)):
        return None
    loops = {e.loops[: depth + 1] for e in updates if len(e.loops) > depth and e.loops[:depth] == event.loops}
    if len(loops) != 1 or any(e.loops[: depth + 1] not in loops or e in trace[index:] for e in updates):
        return None
    steps = [e for e in trace[:index] if e.kind == "scaler_step" and e.optimizer == event.optimizer]
    inside = [e for e in steps if e.loops[: depth + 1] in loops and e.accumulating and e.scaler == event.scaler]
    is_known = event.function is updates[-1].function and not any(e.kind == "handed" for e in trace)
    return next(iter(loops))[-1] if inside and is_known else None


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
    # A backward that a parameter switches off is elsewhere the caller's, and with it perhaps the update.
    own = [e for e in scaled if e.function is step.function and implied(e, step)]
    return bool(own) and step.scaler in params and not others


def shows_all_uses(script: Script, trace: Trace, step: Event) -> bool:
    """Whether a trace shows all uses of the scaler of a step: its creation, or an entire iteration."""
    last = step.scaler.rsplit(".", 1)[-1]
    if "." not in step.scaler and any(e.kind == "make_scaler" for e in trace):
        return True  # a local variable of this trace
    updates = [e for e in script.events("update") if e.scaler.rsplit(".", 1)[-1] == last]
    stepping = {e.function for e in script.events("scaler_step") if e.scaler.rsplit(".", 1)[-1] == last}
    if any(e.function not in stepping for e in updates):
        return False  # by a function that may be called here, rather than in a loop of its own
    scaled_loops = [e.loops[:1] for e in trace if e.kind == "backward" and e.scaled != "no"]
    is_entire = bool(step.loops) and step.loops[:1] in scaled_loops
    # Whoever calls a method for each batch may update it, `trainer.scaler.update()`, unless it is private.
    is_attribute = "." in step.scaler and not (step.scaler.startswith("self._") and scaled_loops)
    return is_entire or (not updates and not is_attribute and bool(script.scalers_named(step.scaler)))


@dataclass(frozen=True)
class Unscaled:
    """Gradients that an Accelerator's clipping has unscaled, before the step of another optimizer updated the scaler."""

    clip: Event
    step: Event
    optimizer: str  # whose gradients are divided by the scale again


def updated_since(script: Script, trace: Trace, index: int, engine: Engine) -> Unscaled | None:
    """What an Accelerator unscales again at an event, a step or a clipping: the gradients of its second optimizer.

    Clipping unscales all prepared optimizers, and the step of each updates the scaler, which then knows of no unscaling.
    """
    event = trace[index]
    victim = event
    if event.kind == "owned_clip":
        following = next(later(trace, index, *_RENEWS, "opt_step"), None)
        victim = trace[following] if following is not None else event
    if victim.kind != "opt_step" or victim.loops != event.loops:
        return None
    steps: list[Event] = []
    cleared: set[str] = set()
    for i in earlier(trace, index, *_RENEWS, "opt_step", "owned_clip", "owned_unscale", "zero_grad"):
        before = trace[i]
        if before.loops != event.loops or before.kind in _RENEWS or before.optimizer == victim.optimizer:
            return None
        if before.kind == "opt_step":
            steps.append(before)
        elif before.kind == "zero_grad":
            cleared.add(before.optimizer)
        else:
            names = prepared_for(script, ACCELERATE, event).names
            is_known = {last_name(e.optimizer) for e in (*steps, victim)} <= names and _clips(before, engine)
            is_cleared = not cleared <= {e.optimizer for e in steps}
            if not steps or not is_known or is_cleared or not _certain(script, (before, *steps), event):
                return None
            return Unscaled(before, steps[0], victim.local.optimizer)
    return None


_RENEWS = ("owned_backward", "backward", "scaler_step", "handed", "autograd_grad", "update")


def _clips(event: Event, engine: Engine) -> bool:
    """Whether a call is the clipping of an Accelerator, or its unscaling of all optimizers."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    is_all = event.kind == "owned_clip" or (
        isinstance(event.node, ast.Call) and not event.node.args + event.node.keywords
    )
    return isinstance(func, ast.Attribute) and last_name(key_of(func.value)) == engine.name and is_all


def _certain(script: Script, before: tuple[Event, ...], event: Event) -> bool:
    """Whether earlier events happen whenever a later one does; the step of an Accelerator waits for its own `sync_gradients`."""
    owned = [replace(e, guards=tuple(g for g in e.guards if not g.text.endswith("sync_gradients"))) for e in before]
    return all(only_settings(script, e, event) for e in owned)
