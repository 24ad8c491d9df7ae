"""Optimizers in a list: which of them a scaler unscales and steps, and which it leaves out.

`opts = [(muon, lr), (adamw, lr)]` and `scaler.step(opts[0][0])` leave out `opts[1][0]`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import between, is_amp, loops_around
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import targets_of
from halfstep.check.script.objects.owners import clipped_models, clips_all, left_scaled, models_of, share
from halfstep.check.script.objects.values import argument, constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS

__all__ = ["LeftOut", "StillScaled", "clipped_scaled", "left_out"]

_ELSEWHERE = ("handed", "owned_step", "engine_step", "owned_backward")


class LeftOut(NamedTuple):
    """What steps an optimizer without the scaler, and that optimizer, or the others of its list, in words."""

    step: Event
    name: str


class StillScaled(NamedTuple):
    """Gradients that a clip includes while they are multiplied by the scale: whose, and the call that divides them."""

    name: str
    unscale: str


class _Entry(NamedTuple):
    """`opts[0][0]`: the list, the first index and those after it."""

    name: str
    position: int
    rest: tuple[int, ...]


def left_out(script: Script, trace: Trace, index: int) -> LeftOut | None:
    """The optimizer that only the branch without the scaler steps, where its gradients are computed in both.

    The other branch steps the optimizer of `trace[index]` as well, under the same conditions.
    """
    step = trace[index]
    if not step.loops or script.has(*_ELSEWHERE):
        return None
    near = [e for e in trace if e.function is step.function and e.loops[: len(step.loops)] == step.loops]
    with_scaler = [e for e in near if e.kind in {"scaler_step", "opt_step"} and compatible(e, step)]
    plain = [e for e in near if e.kind == "opt_step" and not compatible(e, step)]
    backs = [e for e in near if e.kind == "backward"]
    scaled = [e for e in backs if e.scaled == "yes" and compatible(e, step)]
    if not scaled or any(compatible(e, step) and e not in scaled for e in backs) or step is not with_scaler[0]:
        return None
    for other in plain:
        decisive = [g for g in other.guards if g.opposite in step.guards]
        is_switch = len(decisive) == 1 and (is_amp(decisive[0]) or "scaler" in decisive[0].text)
        if not is_switch or not any(e.scaled != "yes" and compatible(e, other) for e in backs):
            continue
        same = {g for g in other.guards if g not in decisive} == {g for g in step.guards if g.opposite not in decisive}
        if same and (name := _left_out_of(script, with_scaler, plain, other)):
            return LeftOut(other, name)
    return None


def _left_out_of(script: Script, with_scaler: list[Event], plain: list[Event], other: Event) -> str:
    """What a step without the scaler trains and no step with the scaler does, in words; "" if there is nothing."""
    loops = [n for n in loops_around(script, other) if isinstance(n, ast.For)]
    source = next((n.iter for n in reversed(loops) if other.local.optimizer in targets_of(n)), None)
    entries = [_entry_of(e) for e in with_scaler]
    if source is not None:
        name = key_of(source)
        used = {e.position for e in entries if e is not None and e.name == name}
        is_known = bool(used) and all(e is not None and e.name == name for e in entries)
        lists = script.outline.values(name, other.function) if is_known and name else []
        sizes = [len(v.elts) for v in lists if isinstance(v, (ast.List, ast.Tuple))]
        return (
            f"all optimizers of `{name}`"
            if len(sizes) == len(lists) and any(set(range(n)) - used for n in sizes)
            else ""
        )
    made = [_created(script, e) for e in with_scaler]
    own, twins = _created(script, other), [e for e in plain if e.guards == other.guards and e.loops == other.loops]
    is_apart = bool(own) and all(m and not m & own for m in made)
    has_twin = any(e.optimizer == s.optimizer for e in twins for s in with_scaler)
    stepped = {e.optimizer for e in script.events("scaler_step", "unscale")}
    return f"`{other.local.optimizer}`" if is_apart and has_twin and other.optimizer not in stepped else ""


def _created(script: Script, event: Event) -> frozenset[ast.AST]:
    """The calls that create the optimizer of a step."""
    values = script.outline.values(event.local.optimizer, event.function)[:MAX_BINDINGS]
    return frozenset(v for v in values if isinstance(v, ast.Call))


def clipped_scaled(script: Script, trace: Trace, first: int, last: int) -> StillScaled | None:
    """The gradients that the clip `trace[last]` includes while they are still scaled, where others have been unscaled since `trace[first]`."""
    if (step := left_scaled(script, trace, first, last)) is not None:
        return StillScaled(f"`{step.local.optimizer}`", f"{step.local.scaler}.unscale_({step.local.optimizer})")
    name = _left_out_of_clip(script, trace, first, last)
    unscale = f"{trace[first].local.scaler}.unscale_ for every optimizer in {name}"
    return StillScaled(f"the other optimizers in `{name}`", unscale) if name else None


def _left_out_of_clip(script: Script, trace: Trace, first: int, last: int) -> str:
    """The list with an optimizer whose gradients a clip includes while they are still scaled; "" if there is none.

    Since the backward only one entry of the list has been unscaled, and the clip receives all parameters of the model of another.
    """
    clip = trace[last]
    unscales = between(trace, first, last, "unscale", *_ELSEWHERE)
    entries = [_entry_of(e) for e in unscales]
    clipped = clipped_models(script, clip)
    if not entries or not clipped or not clips_all(script, clip):
        return ""
    known = [entry for entry in entries if entry is not None]
    if len(known) < len(entries) or len({entry.name for entry in known}) > 1:
        return ""
    name, rest = known[0].name, known[0].rest
    for listed in script.outline.values(name, clip.function)[:MAX_BINDINGS]:
        elements = listed.elts if isinstance(listed, (ast.List, ast.Tuple)) else []
        for i, element in enumerate(elements):
            if i in {entry.position for entry in known}:
                continue
            for value, function in script.outline.sources(key_of(_inside(element, rest)), clip.function):
                params = argument(value, 0, "params") if isinstance(value, ast.Call) else None
                if params is not None and share(clipped, models_of(script, params, function)):
                    return name
    return ""


def _inside(node: ast.expr, path: tuple[int, ...]) -> ast.expr | None:
    """The part of nested tuples at some indices."""
    for i in path:
        if not isinstance(node, (ast.List, ast.Tuple)) or i >= len(node.elts):
            return None
        node = node.elts[i]
    return node


def _entry_of(event: Event) -> _Entry | None:
    """The entry of a list that the optimizer of an event is; None for any other."""
    node = argument(event.node, 0, "optimizer") if isinstance(event.node, ast.Call) else None
    indices = list(_indices(node))
    while isinstance(node, ast.Subscript):
        node = node.value
    name = key_of(node)
    if not name or not indices or not all(isinstance(i, int) and i >= 0 for i in indices):
        return None
    first, *rest = (int(str(i)) for i in reversed(indices))
    return _Entry(name, first, tuple(rest))


def _indices(node: ast.expr | None) -> Iterator[object]:
    """The indices of `opts[1][0]`, the last one first."""
    while isinstance(node, ast.Subscript):
        yield constant(node.slice)
        node = node.value
