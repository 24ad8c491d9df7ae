"""Whether the loss of a backward comes from an autocast region, in the same function or in one that it calls."""

from __future__ import annotations

import ast
import itertools

from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import earlier
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.modules import regions_in_forward
from halfstep.check.script.objects.values import Autocast
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["comes_from", "comes_from_call", "region_of_loss", "regions_in_model"]

MAX_REGIONS = 8  # before one backward that its loss is traced to
MAX_DEPTH = 3  # assignments between a value and the loss


def region_of_loss(script: Script, trace: Trace, index: int) -> Event | None:
    """The autocast region that the loss of a backward is computed in; around or before a disabled one, what this one reads."""
    event = trace[index]
    disabled: Event | None = None
    for i in itertools.islice(earlier(trace, index, "enter_autocast"), MAX_REGIONS):
        opened = trace[i]
        if opened.inside("no_grad"):
            continue  # of a reference or teacher
        around = any(region.node is opened.regions[-1].node for region in event.regions)
        if not around and opened.function is event.function and opened.loops[: len(event.loops)] != event.loops:
            return None
        if disabled is not None:
            # `with autocast(enabled=False): loss = criterion(outputs)`: the gradients go on through the model.
            if opened.function is disabled.function and _assigned(opened.node) & _read_in(disabled.node):
                return opened
            continue
        if around or comes_from(opened, event, script.outline):
            if around or not all(a.enabled == "no" for a in opened.regions[-1].autocasts):
                return opened
            disabled = opened
            continue
        if any("float16" not in a.dtypes or a.enabled == "no" for a in opened.regions[-1].autocasts):
            return None
    return disabled


def regions_in_model(script: Script, trace: Trace, index: int) -> tuple[Event, list[Autocast]] | None:
    """The call of a model of this file before a backward, and the float16 regions that its forward opens, all of them."""
    event = trace[index]
    for i in earlier(trace, index, "forward"):
        call = trace[i]
        is_near = call.function is event.function or (call.function.cls == event.function.cls != "")
        if call.loops != event.loops or not is_near or call.inside("no_grad"):
            continue
        regions = regions_in_forward(script.outline, call.subject, call.function)
        if regions and all(a.dtype == "float16" and a.enabled != "no" for a in regions):
            return call, regions
    return None


def comes_from(opened: Event, event: Event, outline: Outline) -> bool:
    """Whether the loss of a backward is computed in the region that an event opens, or from values that are."""
    block = opened.node
    if not isinstance(event.node, ast.Call):
        return False
    if event.node in set(ast.walk(block)):
        return True  # HS140 reports the backward's place too
    loss = [part for node in (event.node.func, *event.node.args) for part in ast.walk(node)]
    if opened.function is event.function:
        inside = _assigned(block)
        # Any part of `losses["total"]`, `out.loss` or `sum(losses.values())` that the block assigns.
        if inside & {key_of(part) for part in loss}:
            return True
        return bool(inside & _behind({p.id for p in loss if isinstance(p, ast.Name)}, event.function, outline, 1))
    if _assigned_to_self(block) & {key_of(part) for part in loss} and opened.function.cls == event.function.cls:
        return True  # `self.loss`, which one method computes and another one uses
    if _passes_on(opened, event, loss):
        return True
    return _returns(opened, outline) and _is_result(opened, event, loss, outline)


def comes_from_call(called: Event, event: Event, outline: Outline) -> bool:
    """Whether the loss of a backward is what the function of an earlier event returns: its body is all in one region."""
    if not isinstance(event.node, ast.Call) or called.function is event.function:
        return False
    loss = [part for node in (event.node.func, *event.node.args) for part in ast.walk(node)]
    return _is_result(called, event, loss, outline)


def _is_result(opened: Event, event: Event, loss: list[ast.AST], outline: Outline) -> bool:
    """Whether a loss is computed from the result of the call that led to an event."""
    depth = len(event.roots)
    if opened.roots[:depth] != event.roots or len(opened.roots) == depth:
        return False
    call = opened.roots[depth]
    if call in loss:
        return True
    statement: ast.AST | None = call
    while statement is not None and not isinstance(statement, ast.stmt):
        statement = outline.parents.get(statement)
    inside = _assigned(statement) if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else set()
    return bool(inside & _behind({p.id for p in loss if isinstance(p, ast.Name)}, event.function, outline, MAX_DEPTH))


def _passes_on(opened: Event, event: Event, loss: list[ast.AST]) -> bool:
    """Whether a loss is a parameter for which the function of a region passes what the region computes."""
    depth = len(opened.roots)
    call = event.roots[depth] if len(event.roots) == depth + 1 and event.roots[:depth] == opened.roots else None
    if not isinstance(call, ast.Call) or not {key_of(part) for part in loss} & set(event.function.params):
        return False
    values = (*call.args, *(k.value for k in call.keywords))
    return bool(_assigned(opened.node) & {key_of(part) for value in values for part in ast.walk(value)})


def _assigned_to_self(block: ast.AST) -> set[str]:
    return {key for key in _assigned(block) if key.startswith("self.")}


def _returns(opened: Event, outline: Outline) -> bool:
    """Whether the function of a region returns what the region computes."""
    inside = _assigned(opened.node)
    block = set(ast.walk(opened.node))
    for node in ast.walk(opened.function.node):
        if isinstance(node, ast.Return) and node.value is not None:
            names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            if node in block or inside & _behind(names, opened.function, outline, MAX_DEPTH):
                return True
    return False


def _behind(names: set[str], function: Function, outline: Outline, depth: int) -> set[str]:
    """Variables, and those they are computed from in a function."""
    every = set(names)
    for _ in range(depth):
        bound = [b for name in names for b in outline.lookup(name, function) if b.function is function]
        names = {n.id for b in bound if b.value is not None for n in ast.walk(b.value) if isinstance(n, ast.Name)}
        names -= every
        every |= names
    return every


def _assigned(block: ast.AST) -> set[str]:
    return {key for node in ast.walk(block) for key in _stored(node)} - {"self", ""}


def _read_in(block: ast.AST) -> set[str]:
    """The variables that a block reads and does not detach."""
    detached = {
        id(n.func.value)
        for n in ast.walk(block)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "detach"
    }
    names = (n for n in ast.walk(block) if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load))
    return {key_of(n) for n in names if id(n) not in detached} - {""}


def _stored(node: ast.AST) -> tuple[str, ...]:
    """The variables that a node assigns: for `losses["ce"] = ...` both the item and the dictionary."""
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) or not isinstance(node.ctx, ast.Store):
        return ()
    return (key_of(node), key_of(node.value)) if isinstance(node, ast.Subscript) else (key_of(node),)
