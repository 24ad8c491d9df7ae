"""Traces: what a run of the script does, with functions of the same file expanded at their calls.

A trace starts at a root: the module's own statements, or a function nothing in the file calls. Each call of a known
function is replaced by that function's events, under the caller's guards, loops and regions, with parameters renamed
to the caller's variables. A function called from two places appears in both traces; a function that is never called is
a separate root, because other files may call it.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator

from halfstep.check.script.flow.event import Event, Guard, Loop, Region
from halfstep.check.script.flow.flow import MODEL_NAME, Item, Jump, read_flow
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.recognise import Recogniser
from halfstep.check.script.syntax.children import statements_in
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["Trace", "read_traces", "with_own_scaler"]

MAX_DEPTH = 8
# A trace this long is generated code, or functions that all call each other; the events so far are still valid.
MAX_EVENTS = 3000
MAX_CALLS = 1000
MAX_IN_ALL = 20_000

Trace = tuple[Event, ...]

_SPAWNS = ("spawn", "start_processes", "Process", "launch")  # of torch.multiprocessing, multiprocessing and detectron2


def read_traces(outline: Outline) -> tuple[Trace, ...]:
    """Every root's trace that has any event, the module's first."""
    recogniser = Recogniser(outline)
    flows = {
        f: [] if f.node in outline.unread and not _creates(f) else read_flow(outline, recogniser, f)
        for f in (outline.module, *outline.functions)
    }
    called = {item.target for items in flows.values() for item in items if isinstance(item, Jump)}
    spawned = _spawned(outline)
    roots = [f for f in flows if f not in called or f in spawned]
    followed: set[Function] = set()
    traces: list[Trace] = []
    # Functions that only call each other are reached from no root; each is read separately, after the roots.
    for function in dict.fromkeys((*roots, *flows)):
        is_root = function not in called or function not in followed or function in spawned
        if is_root and sum(map(len, traces)) < MAX_IN_ALL:
            traces.append(_Follow(flows, followed).run(function))
    return tuple(trace for trace in traces if trace)


def _creates(function: Function) -> bool:
    """Whether a function assigns a new object to a variable that may be a model: the one event without a word of its own."""
    assigned = (s for s in statements_in(function.node) if isinstance(s, ast.Assign) and isinstance(s.value, ast.Call))
    return any(MODEL_NAME.search(last_name(key_of(target)).lower()) for s in assigned for target in s.targets)


def _spawned(outline: Outline) -> set[Function]:
    """The functions that run in processes of their own: `mp.spawn(main)` next to a plain `main()` for one process."""
    sites = [site for name in _SPAWNS for site in outline.calls.get(name, ())]
    passed = [value for call, _ in sites for value in (*call.args[:1], *(k.value for k in call.keywords))]
    names = {value.id for value in passed if isinstance(value, ast.Name)}
    return {f for f in outline.functions if f.name in names and not f.cls} if names else set()


class _Follow:
    def __init__(self, flows: dict[Function, list[Item]], followed: set[Function]) -> None:
        self.flows = flows
        self.followed = followed
        self.copies = 0
        self.events: list[Event] = []

    def run(self, root: Function) -> Trace:
        self.follow(root, {}, {}, (), (), (), (), (root,))
        return tuple(self.events)

    def follow(
        self,
        function: Function,
        renamed: dict[str, str],
        known: dict[str, bool],
        guards: tuple[Guard, ...],
        loops: tuple[Loop, ...],
        regions: tuple[Region, ...],
        roots: tuple[ast.AST, ...],
        path: tuple[Function, ...],
    ) -> None:
        self.followed.add(function)
        self.copies += 1
        copy = self.copies
        local = f"#{copy}" if copy > 1 else ""
        for item in self.flows[function]:
            if len(self.events) >= MAX_EVENTS or self.copies >= MAX_CALLS:
                return
            tests = tuple(_reduced(g, known) for g in item.guards) if known else item.guards
            if any(known.get(text, is_true) != is_true for text, is_true in tests):
                continue  # the caller's literal rules it out
            open_guards = tuple(g for g in tests if g.text not in known)
            own_guards = tuple(_rename_guards(open_guards, renamed, function, local))
            if guards and own_guards and not possible(guards, own_guards):
                continue  # the caller's conditions rule it out
            inner_guards = (*guards, *own_guards)
            inner_loops = (*loops, *(Loop(copy, loop.line, loop.column) for loop in item.loops))
            inner_regions = (*regions, *_shift(_decided(item.regions, known), len(loops)))
            if isinstance(item, Event):
                self.events.append(
                    dataclasses.replace(
                        item,
                        scaler=_rename(item.scaler, renamed),
                        optimizer=_rename(item.optimizer, renamed),
                        subject=_rename(item.subject, renamed),
                        guards=inner_guards,
                        loops=inner_loops,
                        regions=inner_regions,
                        roots=roots,
                        written=item if renamed else None,
                    )
                )
            elif item.target not in path and len(path) < MAX_DEPTH:
                arguments = {name: _rename(value, renamed) for name, value in item.arguments.items() if value}
                self.follow(
                    item.target,
                    arguments,
                    item.known,
                    inner_guards,
                    inner_loops,
                    inner_regions,
                    (*roots, item.call),
                    (*path, item.target),
                )


def _reduced(guard: Guard, known: dict[str, bool]) -> Guard:
    """A condition without the parts that literals make false: `is_last` of `not accumulate or is_last` for accumulate=True."""
    parts = guard.text.split(" or ")
    if len(parts) == 1 or "(" in guard.text or " and " in guard.text:
        return guard
    values = [known.get(part.removeprefix("not ")) for part in parts]
    is_false = [
        value is not None and value is part.startswith("not ") for part, value in zip(parts, values, strict=True)
    ]
    rest = [part for part, off in zip(parts, is_false, strict=True) if not off]
    return Guard(rest[0], guard.is_true) if len(rest) == 1 and not rest[0].startswith("not ") else guard


def _rename(key: str, renamed: dict[str, str]) -> str:
    root, dot, rest = key.partition(".")
    return renamed[root] + dot + rest if root in renamed else key


def _rename_guards(
    guards: tuple[Guard, ...], renamed: dict[str, str], function: Function, local: str
) -> Iterator[Guard]:
    for text, is_true in guards:
        root = text.partition(".")[0]
        if root in renamed:
            yield Guard(_rename(text, renamed), is_true)
        elif text in function.params and local:
            yield Guard(text + local, is_true)  # specific to this call, such as a literal argument
        else:
            yield Guard(text, is_true)


def _decided(regions: tuple[Region, ...], known: dict[str, bool]) -> tuple[Region, ...]:
    """The regions of a function, where `set_grad_enabled(is_training)` has the value that the caller passes."""
    if not known or not any(r.switch for r in regions):
        return regions
    return tuple(dataclasses.replace(r, kind="no_grad") if known.get(r.switch) is False else r for r in regions)


def _shift(regions: Iterable[Region], by: int) -> Iterator[Region]:
    for region in regions:
        yield dataclasses.replace(region, num_loops=region.num_loops + by) if by else region


def with_own_scaler(trace: Trace) -> Trace:
    """A trace with `accelerator.backward(scaler.scale(loss))` as a scaled backward, and with the steps of that scaler."""
    own = {e.scaler for e in trace if e.kind == "update"} if any(e.kind == "owned_backward" for e in trace) else set()
    scaled = {e: key for e in trace if own and e.kind == "owned_backward" and (key := _scale_of(e.node)) in own}
    if not scaled:
        return trace
    backs = (
        dataclasses.replace(e, kind="backward", scaler=scaled[e], scaled="yes") if e in scaled else e for e in trace
    )
    return tuple(
        dataclasses.replace(e, kind="scaler_step") if e.kind == "owned_step" and e.scaler in own else e for e in backs
    )


def _scale_of(call: ast.AST) -> str:
    """The scaler of `accelerator.backward(scaler.scale(loss))`; "" for any other call."""
    value = call.args[0] if isinstance(call, ast.Call) and call.args else None
    func = value.func if isinstance(value, ast.Call) else None
    return key_of(func.value) if isinstance(func, ast.Attribute) and func.attr == "scale" else ""
