"""Whether the loss of a backward comes from an autocast region, in the same function or in one that it calls."""

from __future__ import annotations

import ast
import itertools
from functools import lru_cache

from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import earlier
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.modules import regions_in_forward
from halfstep.check.script.objects.values import Autocast
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline, last_name_of

__all__ = ["comes_from", "comes_from_call", "region_of_loss", "regions_in_model"]

MAX_REGIONS = 8  # before one backward that its loss is traced to
MAX_DEPTH = 12  # assignments between a value and the loss
_COLLECTS = {"append", "extend", "insert", "add", "update"}  # `losses.append(loss)`
_ENDS = {"detach", "item", "tolist", "numpy"}  # no gradient passes these calls


def region_of_loss(script: Script, trace: Trace, index: int) -> Event | None:
    """The autocast region that the loss of a backward is computed in; around or before a disabled one, what this one reads."""
    event = trace[index]
    disabled: Event | None = None
    called: Event | None = None  # in a function that computes the loss, or a part of it
    for i in itertools.islice(earlier(trace, index, "enter_autocast"), MAX_REGIONS):
        opened = trace[i]
        if opened.inside("no_grad"):
            continue  # of a reference or teacher
        around = any(region.node is opened.regions[-1].node for region in event.regions)
        if not around and opened.function is event.function and opened.loops[: len(event.loops)] != event.loops:
            return called
        if disabled is not None:
            # `with autocast(enabled=False): loss = criterion(outputs)`: the gradients go on through the model.
            if opened.function is disabled.function and _assigned(opened.node) & _read_in(disabled.node):
                return opened
            continue
        if around or comes_from(opened, event, script.outline):
            if not around and all(a.enabled == "no" for a in opened.regions[-1].autocasts):
                disabled = opened if called is None else None
                continue
            if around or opened.function is event.function:
                return opened
            called = called or opened
            continue
        if any("float16" not in a.dtypes or a.enabled == "no" for a in opened.regions[-1].autocasts):
            return called
    return called or disabled


def regions_in_model(script: Script, trace: Trace, index: int) -> tuple[Event, list[Autocast]] | None:
    """The call of a model of this file before a backward, and the float16 regions that its forward opens, all of them."""
    event = trace[index]
    for i in earlier(trace, index, "forward"):
        call = trace[i]
        is_near = call.function is event.function or (call.function.cls == event.function.cls != "")
        if call.loops != event.loops or not is_near or call.inside("no_grad"):
            continue
        if call.function is event.function and not _may_come_from(call.node, event, script.outline):
            continue
        regions = regions_in_forward(script.outline, call.subject, call.function)
        if regions and all(a.dtype == "float16" and a.enabled != "no" for a in regions):
            return call, regions
    return None


def _may_come_from(call: ast.AST, event: Event, outline: Outline) -> bool:
    """Whether gradients of a loss may reach what a call of the same function gives; not if the function computes it from other things."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    loss = func.value if isinstance(func, ast.Attribute) else None
    bound = (
        [b for b in outline.lookup(loss.id, event.function) if b.value is not None]
        if isinstance(loss, ast.Name)
        else []
    )
    if not isinstance(loss, ast.Name) or not bound:
        return True
    behind = _behind({loss.id}, event.function, outline)
    values = [b.value for name in behind for b in outline.lookup(name, event.function) if b.value is not None]
    return bool(_results_of(call, outline) & behind) or any(call is n for value in values for n in ast.walk(value))


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
        return bool(inside & _behind({p.id for p in loss if isinstance(p, ast.Name)}, event.function, outline))
    if _assigned_to_self(block) & {key_of(part) for part in loss} and opened.function.cls == event.function.cls:
        return True  # `self.loss`, which one method computes and another one uses
    if _passes_on(opened, event, loss, outline):
        return True
    return _returns(opened, outline) and (
        _is_result(opened, event, loss, outline) or _is_passed_result(opened, event, loss, outline)
    )


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
    inside = _results_of(call, outline)
    return bool(inside & _behind({p.id for p in loss if isinstance(p, ast.Name)}, event.function, outline))


def _is_passed_result(opened: Event, event: Event, loss: list[ast.AST], outline: Outline) -> bool:
    """Whether a function passes the result of a call that led to a region on to the one with the backward.

    `losses = self.compute_loss(batch)` opens the region, and `self.optimizer_step(losses["total"])` has the backward.
    """
    depth = len(event.roots) - 1
    if depth < 0 or len(opened.roots) <= depth or opened.roots[:depth] != event.roots[:depth]:
        return False
    created, used = opened.roots[depth], event.roots[depth]
    sites = outline.calls.get(last_name_of(used.func), ()) if isinstance(used, ast.Call) else ()
    caller = next((site.function for site in sites if site.call is used), None)
    passed = [part for value in _passed_as_loss(event, used, loss, outline) for part in ast.walk(value)]
    names = {part.id for part in passed if isinstance(part, ast.Name)}
    if created in passed or caller is None:
        return created in passed
    return bool(_results_of(created, outline) & _behind(names, caller, outline))


def _results_of(call: ast.AST, outline: Outline) -> set[str]:
    """The variables that the statement of a call assigns, or adds to."""
    statement: ast.AST | None = call
    while statement is not None and not isinstance(statement, ast.stmt):
        statement = outline.parents.get(statement)
    inside = _assigned(statement) if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else set()
    return inside | ({_collection(statement.value)} - {""} if isinstance(statement, ast.Expr) else set())


def _passes_on(opened: Event, event: Event, loss: list[ast.AST], outline: Outline) -> bool:
    """Whether a loss is, or is computed from, a parameter for which the function of a region passes what the region computes."""
    depth = len(opened.roots)
    call = event.roots[depth] if len(event.roots) == depth + 1 and event.roots[:depth] == opened.roots else None
    values = _passed_as_loss(event, call, loss, outline)
    return bool(_assigned(opened.node) & {key_of(part) for value in values for part in ast.walk(value)})


def _passed_as_loss(event: Event, call: ast.AST | None, loss: list[ast.AST], outline: Outline) -> list[ast.expr]:
    """What a call of the function with a backward passes for the parameters that its loss is, or is computed from."""
    params = event.function.params
    names = _behind({p.id for p in loss if isinstance(p, ast.Name)}, event.function, outline) & set(params)
    if not isinstance(call, ast.Call) or not names:
        return []
    bound = params[event.function.method and params[0] in {"self", "cls"} :]
    passed = [*zip(bound, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
    return [value for name, value in passed if name in names or name is None]


def _assigned_to_self(block: ast.AST) -> set[str]:
    return {key for key in _assigned(block) if key.startswith("self.")}


def _returns(opened: Event, outline: Outline) -> bool:
    """Whether the function of a region returns what the region computes."""
    inside = _assigned(opened.node)
    block = set(ast.walk(opened.node))
    for node in ast.walk(opened.function.node):
        if isinstance(node, ast.Return) and node.value is not None:
            names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            if node in block or inside & _behind(names, opened.function, outline):
                return True
    return False


def _behind(names: set[str], function: Function, outline: Outline) -> set[str]:
    """Variables, and those that they are computed from in a function with gradients: assigned, or collected in a list."""
    every = set(names)
    collected = _collected(function)
    for _ in range(MAX_DEPTH):
        bound = [b for name in names for b in outline.lookup(name, function) if b.function is function]
        values = [b.value for b in bound if b.value is not None]
        values += [value for name in names for value in collected.get(name, ())]
        names = {name for value in values for name in _attached(value)} - every
        if not names:
            break
        every |= names
    return every


def _attached(value: ast.expr) -> set[str]:
    """The variables of an expression that its gradients reach."""
    names: set[str] = set()
    todo: list[ast.AST] = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name):
            names.add(node.id)
        func = node.func if isinstance(node, ast.Call) else None
        if not (isinstance(func, ast.Attribute) and func.attr in _ENDS):
            todo += ast.iter_child_nodes(node)
    return names


def _collection(node: ast.expr) -> str:
    """The list or dictionary to which a call adds its arguments."""
    func = node.func if isinstance(node, ast.Call) else None
    return key_of(func.value) if isinstance(func, ast.Attribute) and func.attr in _COLLECTS else ""


@lru_cache(maxsize=64)
def _collected(function: Function) -> dict[str, list[ast.expr]]:
    """What a function adds to each of its lists and dictionaries."""
    collected: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function.node):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and (name := _collection(node.value)):
            collected.setdefault(name, []).extend([*node.value.args, *(k.value for k in node.value.keywords)])
        elif isinstance(node, ast.Assign):
            stored = [key_of(t.value) for t in node.targets if isinstance(t, ast.Subscript)]
            for name in stored:
                collected.setdefault(name, []).append(node.value)
    return collected


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
