"""The fixes of a training loop: insert `update()` or `unscale_()`, or scale the loss.

Each is offered only where the text shows the one right place: the variables are those of the function that is edited, the
inserted line runs once per step, and under the same condition as the step it belongs to. `bound` then verifies that the
names have a value there.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from halfstep.check.finding import Edit, Fix
from halfstep.check.script.flow.event import Event, is_accumulation
from halfstep.check.script.flow.order import is_amp, later
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.owners import clipped_models, is_of_another, optimized_models, share
from halfstep.check.script.objects.values import argument, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["scale_fix", "unscale_fix", "update_fix"]

_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign)


def update_fix(script: Script, trace: Trace, index: int) -> Fix | None:
    """Call `update()` after a step; after the loop, if the loop steps several optimizers."""
    event = trace[index]
    scaler = _scaler_at(event)
    statement: ast.stmt | None = script.statement(event.node)
    if not scaler or not isinstance(statement, (ast.Expr, ast.Assign)):
        return None
    if any(trace[i].scaler == event.scaler for i in later(trace, index, "scaler_step")):
        return None  # once, after the last step
    backwards = [e for e in trace[:index] if e.kind == "backward" and e.scaled != "no"]
    if not backwards:
        return None
    around = backwards[-1].loops
    if event.loops[: len(around)] != around:
        return None  # steps after the loop of its backward: an epoch, or a window that ends elsewhere
    for _ in event.loops[len(around) :]:
        loop = _loop_around(script, statement)
        if loop is None:
            return None
        statement = loop
    return Fix(f"call {scaler}.update() after the step", (_line_after(script, statement, f"{scaler}.update()"),))


def scale_fix(script: Script, event: Event, step: Event) -> Fix | None:
    """Scale the loss of a backward whose gradients the scaler steps with."""
    scaler, call = _scaler_at(step), event.node
    if not scaler or step.function is not event.function or not isinstance(call, ast.Call):
        return None
    if not isinstance(call.func, ast.Attribute) or script.outline.names.full(call.func):
        return None  # torch.autograd.backward(loss)
    extra = set(step.guards) - set(event.guards)
    if any(not is_accumulation(guard) for guard in extra):
        return None  # scaled, the gradients would be too large for the step in the other branch
    receiver = call.func.value
    edit = script.lines.replace(receiver, f"{scaler}.scale({script.lines.source(receiver)})")
    return Fix(f"scale the loss with {scaler} before backward", (edit,))


def unscale_fix(script: Script, trace: Trace, start: int, index: int) -> Fix | None:
    """Unscale before the first clip of a step, with the optimizer whose gradients are clipped."""
    back = trace[start]
    following = _step_of(script, trace, start, index)
    if following is None:
        return None
    step = trace[following]
    between = trace[start + 1 : following]
    if any(e.kind == "unscale" and _same(e.optimizer, step.optimizer) for e in between):
        return None  # unscaled after this clip, or on another path: twice is an error
    clips = [e for e in between if e.kind == "clip" and not is_of_another(script, trace, step, e)]
    depth = _common([step, *clips])
    if len(step.roots) == depth:
        scaler, optimizer = _scaler_at(step), _optimizer_at(step)
    elif depth == 0:
        scaler, optimizer = step.scaler, step.optimizer
    else:
        return None  # a function between the two, whose names for them are not known
    if not scaler or not optimizer:
        return None
    place = _place(script, [_anchor(e, depth) for e in clips], _anchor(step, depth))
    if place is None:
        return None
    statement, guard = place
    if back.roots[:depth] == step.roots[:depth]:
        begin = script.statement(_anchor(back, depth))
        if begin is None or (begin.end_lineno or begin.lineno, begin.end_col_offset or 0) > (
            statement.lineno,
            statement.col_offset,
        ):
            return None  # backward runs after this line, or inside it
    written = f"{scaler}.unscale_({optimizer})"
    if guard:
        if not script.lines.alone_before(statement):
            return None
        written = f"if {guard}:\n{script.lines.indent_unit(statement)}{written}"
    title = f"unscale the gradients of {optimizer} before clipping"
    return Fix(title, (_line_before(script, statement, written),))


def _step_of(script: Script, trace: Trace, start: int, index: int) -> int | None:
    """The scaler's step that uses the gradients of a clip; None if several may."""
    back, clip = trace[start], trace[index]
    steps: list[int] = []
    for i in later(trace, index, "scaler_step", "backward", "opt_step"):
        if trace[i].kind == "backward" and trace[i].scaled != "no" and i > start:
            break
        if trace[i].kind == "scaler_step" and trace[i].scaler == back.scaler:
            steps.append(i)
    if len({trace[i].optimizer for i in steps}) > 1:
        clipped = clipped_models(script, clip)
        steps = [i for i in steps if share(clipped, optimized_models(script, trace[i]))]
        if len({trace[i].optimizer for i in steps}) != 1:
            return None
    if not steps or is_of_another(script, trace, trace[steps[0]], clip):
        return None
    stepped = optimized_models(script, trace[steps[0]])
    clipped = clipped_models(script, clip)
    # Several models of which this optimizer steps only some: the others would stay scaled.
    if clipped and stepped and not all(share(frozenset({model}), stepped) for model in clipped):
        return None
    return steps[0]


def _place(script: Script, clips: Sequence[ast.AST], step: ast.AST) -> tuple[ast.stmt, str] | None:
    """The statement before which to unscale, and the condition to repeat; None if no line runs exactly once per step."""
    first, last = script.statement(clips[0]), script.statement(step)
    if first is None or last is None:
        return None
    if not isinstance(last, _SIMPLE):
        return None
    above = _ancestors(script, last)
    for statement in (first, *_ancestors(script, first)):
        block = _block_of(script, statement)
        if block is None:
            return None
        if any(s is last for s in block):
            return statement, ""
        branch = next((s for s in block if any(s is a for a in above)), None)
        if branch is None:
            continue  # the step is further out
        if not isinstance(branch, ast.If) or not any(s is last for s in branch.body):
            return None
        return _under_guard(script, statement, branch, first)
    return None


def _under_guard(script: Script, statement: ast.stmt, branch: ast.If, first: ast.stmt) -> tuple[ast.stmt, str] | None:
    """The place for a step that is under `if scaler is not None:` while the clip is not, or is under a second such `if`."""
    test = script.lines.source(branch.test)
    if not is_amp((text_of(branch.test), True)) or any(isinstance(n, ast.Call) for n in ast.walk(branch.test)):
        return None
    if isinstance(statement, ast.If) and text_of(statement.test) == text_of(branch.test):
        above = [first, *_ancestors(script, first)]
        inner = next((s for s in statement.body if any(s is a for a in above)), None)
        return (inner, "") if inner is not None else None
    return statement, test


def _scaler_at(step: Event) -> str:
    """The scaler's variable in the function that calls its step."""
    call = step.node
    return key_of(call.func.value) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


def _optimizer_at(step: Event) -> str:
    return key_of(argument(step.node, 0, "optimizer")) if isinstance(step.node, ast.Call) else ""


def _same(a: str, b: str) -> bool:
    return not a or not b or a.rsplit(".", 1)[-1] == b.rsplit(".", 1)[-1]


def _common(events: Sequence[Event]) -> int:
    """How many calls led to all of these events, from the root of the trace."""
    rows = [event.roots for event in events]
    depth = 0
    while all(len(row) > depth for row in rows) and len({id(row[depth]) for row in rows}) == 1:
        depth += 1
    return depth


def _anchor(event: Event, depth: int) -> ast.AST:
    """The event itself, or the call that leads to it, in the function at this depth."""
    return event.node if len(event.roots) == depth else event.roots[depth]


def _ancestors(script: Script, node: ast.AST) -> list[ast.stmt]:
    """The statements around a statement, up to its function."""
    above = []
    parent = script.outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if isinstance(parent, ast.stmt):
            above.append(parent)
        parent = script.outline.parents.get(parent)
    return above


def _block_of(script: Script, statement: ast.stmt) -> list[ast.stmt] | None:
    parent = script.outline.parents.get(statement)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and any(s is statement for s in block):
            return block
    return None


def _loop_around(script: Script, statement: ast.stmt) -> ast.stmt | None:
    """The loop a statement is directly in."""
    for parent in _ancestors(script, statement):
        if isinstance(parent, (ast.For, ast.While)):
            return parent
        if not isinstance(parent, (ast.With, ast.Try)):
            return None
    return None


def _line_before(script: Script, statement: ast.stmt, text: str) -> Edit:
    if script.lines.alone_before(statement):
        return script.lines.before(statement, text)
    start = script.lines.span(statement)[0]
    return Edit(start, start, f"{text}; ")


def _line_after(script: Script, statement: ast.stmt, text: str) -> Edit:
    if script.lines.alone(statement):
        return script.lines.after(statement, text)
    end = script.lines.span(statement)[1]
    return Edit(end, end, f"; {text}")
