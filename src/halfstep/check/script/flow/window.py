"""Accumulation windows: which step ends the window of a line that runs on every micro-batch.

A window is written in two ways. In one loop over micro-batches the step waits, by a count (`(i + 1) % n == 0`) or by a flag
that the caller computes. With a loop over the micro-batches of one step, the step comes after that inner loop.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from itertools import combinations, takewhile

from halfstep.check.regex import regex
from halfstep.check.script.flow.conditions import leaves_block
from halfstep.check.script.flow.event import Event, Guard, compatible
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.order import STEPS, later, loops_around, only_settings
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.outline import MAX_BINDINGS

__all__ = [
    "ACCUMULATION",
    "Window",
    "abandons",
    "accumulated_over",
    "alternatives",
    "branched",
    "contexts_before",
    "depth_without_optimizers",
    "is_trial",
    "last_of_window",
    "length_of",
    "micro_batches",
    "targets_of",
    "window_of",
    "window_of_clearing",
    "window_of_flag",
    "window_of_loop",
]

# Names of the number of micro-batches.
ACCUMULATION = regex(
    r"accum|acc_|_acc|virtual|subdivision|batch_split|micro|iter_size|grad_steps|update_freq", re.IGNORECASE
)
# A flag, not a number: `self.accumulate`, `cfg.is_accumulating`.
_HELD_BACK = regex(
    r"^[\w.]*?(?<![a-z])accum(ulat(e|es|ed|ing|ion))?(_(grads?|gradients?|only|mode|enabled))?$", re.IGNORECASE
)
_BACKWARDS = ("backward", "owned_backward")
_MODULO = regex(r"%\s*([A-Za-z_][\w.\[\]'\"]*|\d+)")
# Functions that test it: `divisible_by(step, accumulate)`, `self.every_n_iters(runner, self.update_interval)` of mmcv's hooks.
_EVERY = regex(r"\b(?:every_n_\w+|(?:is_)?divisible(?:_by)?)\([^()]+, ([A-Za-z_][\w.\[\]'\"]*|\d+)\)")
_REACHED = regex(r"(?:==|>=) ([A-Za-z_][\w.\[\]'\"]*)$")  # the number that a counter has to reach
_WRAPPED = regex(r"^([A-Za-z_][\w.]*) == 0$")
_NOT_REACHED = regex(r"<=? ([A-Za-z_][\w.\[\]'\"]*)$")
_FINITE = regex(r"finite|nan|inf", re.IGNORECASE)  # a test of the gradients, not of the window
_AROUND = {"enumerate", "tqdm", "zip", "list", "iter", "reversed"}  # functions that iterate over their first argument
_CHUNKS = regex(r"chunk|split", re.IGNORECASE)
_SIZE = regex(r"batch_?size|bs$|samples", re.IGNORECASE)  # of a chunk, rather than how many there are
_PART = regex(r"micro|mini|sub_?batch|chunk|split|(^|_)mbs?$", re.IGNORECASE)  # of a batch: its size
_TRIED = regex(r"\b(\w+_)?(batch_?size|bs|bsz)\b", re.IGNORECASE)  # `for batch_size in (8, 16, 32)`
_MICRO = regex(r"^_?(micro|mini|sub)_?batches$", re.IGNORECASE)
_TOTAL = regex(r"epoch|iters?$|steps$|len\(", re.IGNORECASE)
_COUNTER = regex(r"(==|>=) [A-Za-z_]")  # `count == accumulate`, `count >= accumulate`


@dataclass(frozen=True)
class Window:
    """An accumulation window: the step that ends it, and when that step runs."""

    step: Event
    ends: str  # in words: `(i + 1) % n == 0`, or the end of a loop
    length: str = ""  # the number of micro-batches, as the script writes it
    by_loop: bool = False  # whether it is a loop of its own, with the step after it
    guard: Guard | None = None  # the condition that is true at its end

    def line(self, script: Script) -> int:
        """The line of the step."""
        return script.where(self.step.node).line


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
        if step.loops and ("%" in text or _COUNTER.search(text) or _EVERY.search(text)):
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
    return Window(after[0], f"the loop at line {script.where(loop).line} ends")


def targets_of(loop: ast.AST) -> set[str]:
    """The variables that a `for` loop assigns."""
    target = getattr(loop, "target", None)
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)} if target is not None else set()


def accumulated_over(script: Script, trace: Trace, index: int) -> Window | None:
    """The window over which the gradients of a backward accumulate, with its length."""
    event = trace[index]
    following = next(later(trace, index, *STEPS), None)
    step = trace[following] if following is not None else None
    if step is None or step.kind == "owned_step":
        return None
    complemented = branched(trace, event)
    if any(g not in step.guards and g not in complemented for g in event.accumulating):
        return None
    depth = min(len(step.loops), len(event.loops))
    if step.loops[:depth] != event.loops[:depth]:
        depth = depth_without_optimizers(script, step)  # `for o in optimizers: o.step()` after the loop
    if step.loops[:depth] != event.loops[:depth] or not _is_over_optimizers(script, step, depth):
        return None
    shared = set(event.guards) - set(complemented)
    for guard in step.accumulating:
        length = "" if guard in shared else length_of(script, guard)
        if length:
            return Window(step, f"`{guard.text}`" if guard.is_true else f"not `{guard.text}`", length, guard=guard)
    return _counted_loop(script, event, step, depth) if len(event.loops) > depth else None


def branched(trace: Trace, event: Event) -> list[Guard]:
    """The ends of a window around a backward that another one complements: `if last: backward`, `else: with no_sync(): backward`."""
    near = [e for e in trace if e.loops == event.loops and e is not event]
    others = [(g, [e for e in near if not possible((g,), e.guards)]) for g in event.accumulating]
    return [
        guard
        for guard, branch in others
        if any(e.kind == event.kind for e in branch)
        # Two branches with a step each are two models in turn.
        and not any(e.kind in STEPS for e in branch)
    ]


def abandons(script: Script, event: Event) -> bool:
    """Whether gradients are cleared because a window is given up: `if bad: optimizer.zero_grad(); break`, or after an exception."""
    parents = list(takewhile(lambda n: not isinstance(n, (ast.For, ast.While)), script.above(event.node)))
    if any(isinstance(n, ast.ExceptHandler) for n in parents):
        return True
    blocks = [block for n in parents if isinstance(n, ast.If) for block in (n.body, n.orelse)]
    return any(script.statement(event.node) in block and leaves_block(block) for block in blocks)


def depth_without_optimizers(script: Script, step: Event) -> int:
    """How many loops are around a step, without those over the optimizers: `for o in optimizers: scaler.step(o)`."""
    depth = len(step.loops)
    while depth and _is_over_optimizers(script, step, depth - 1):
        depth -= 1
    return depth


def _is_over_optimizers(script: Script, step: Event, depth: int) -> bool:
    """Whether the loops around a step, from a depth on, are over the optimizers: `for o in optimizers: o.step()`."""
    names = set(re.findall(r"\w+", step.local.optimizer))
    loops = loops_around(script, step)
    return len(loops) == len(step.loops) and all(names & targets_of(loop) for loop in loops[depth:])


def length_of(script: Script, guard: Guard) -> str:
    """The window length in a condition: `accumulation_steps` in `(i + 1) % accumulation_steps == 0`."""
    text = guard.text
    bound = script.outline.bindings.get(text, ())  # a flag that a caller computes and passes
    value = bound[0].value if len(bound) == 1 and bound[0].index is None else None
    texts = (text, text_of(value))
    match = next((m for pattern in (_MODULO, _EVERY) for t in texts if (m := pattern.search(t))), None)
    if match:
        return match.group(1)
    counter = _WRAPPED.search(text)  # `if count == 0:` after `count = (count + 1) % n`
    for binding in (
        script.outline.bindings.get(counter.group(1), ())[:MAX_BINDINGS] if counter and guard.is_true else ()
    ):
        if match := _MODULO.search(text_of(binding.value)):
            return match.group(1)
    pattern = _REACHED if guard.is_true else _NOT_REACHED
    ends = (m for part in text.split(" or ") if (m := pattern.search(part)))  # `count >= n or is_last`
    return next((end.group(1) for end in ends if ACCUMULATION.search(end.group(1))), "")


def _counted_loop(script: Script, event: Event, step: Event, depth: int) -> Window | None:
    """The window of a backward inside `for micro in range(n)`, with the step after that loop."""
    loops = loops_around(script, event)
    if len(loops) != len(event.loops):
        return None
    # Inside a window there may be another loop, over patches or losses.
    lengths = [(loop, length) for loop in loops[depth:] if (length := micro_batches(loop))]
    if not lengths and len(loops) == depth + 1:
        lengths = [(loops[depth], _slices(loops[depth]) or _named_length(script, loops[depth], event))]
    loop, length = lengths[0] if lengths else (None, "")
    if loop is None or not length:
        return None
    return Window(step, f"the loop at line {script.where(loop).line} ends", length, by_loop=True)


def _named_length(script: Script, loop: ast.AST, event: Event) -> str:
    """The number of micro-batches of a loop over `range(size)` or `chunks`, where these are variables; "" for any other."""
    source = loop.iter if isinstance(loop, ast.For) else None
    while isinstance(source, ast.Call) and text_of(source.func).rsplit(".", 1)[-1] in _AROUND and source.args:
        source = source.args[0]
    is_range = isinstance(source, ast.Call) and text_of(source.func) == "range" and len(source.args) == 1
    name = text_of(source.args[0] if isinstance(source, ast.Call) and is_range else source)
    values = script.outline.values(name, event.function) if name.replace(".", "").isidentifier() else []
    if is_range:  # size = min(accumulation_steps, rest)
        return name if values and all(ACCUMULATION.search(text_of(value)) for value in values) else ""
    calls = [value for value in values if isinstance(value, ast.Call)]  # chunks = x.split(size)
    is_split = all(_CHUNKS.search(text_of(call.func).rsplit(".", 1)[-1]) for call in calls)
    return f"len({name})" if calls and len(calls) == len(values) and is_split else ""


def _slices(loop: ast.AST) -> str:
    """The number of slices of a loop `for i in range(0, n, size)` whose body reads `batch[i : i + size]`; "" for any other."""
    source = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(source, ast.Call) or text_of(source.func) != "range" or len(source.args) != 3:
        return ""
    assert isinstance(loop, ast.For)
    start, total, size = map(text_of, source.args)
    index = text_of(loop.target)
    is_sliced = any(
        isinstance(node, ast.Slice) and text_of(node.lower) == index and text_of(node.upper) == f"{index} + {size}"
        for statement in loop.body
        for node in ast.walk(statement)
    )
    return f"{total} / {size}" if start == "0" and is_sliced and _PART.search(size) else ""


def alternatives(events: list[Event]) -> bool:
    """Whether at most one of some events happens in an iteration: the branches with and without AMP."""
    return bool(events) and not any(compatible(a, b) for a, b in combinations(events, 2))


def last_of_window(trace: Trace, index: int) -> tuple[Guard, Event] | None:
    """The condition under which a clearing, a backward and a step follow each other, and that step.

    The other branch computes the gradients of the other micro-batches: `if last: clear, backward, step` and `else: backward`.
    """
    event = trace[index]
    near = [e for e in trace if e.loops == event.loops and e.kind in {*_BACKWARDS, *STEPS, "zero_grad"}]
    for guard in event.accumulating:
        own = [e for e in near if guard in e.guards]
        rest = own[own.index(event) + 1 :]
        others = {e.kind for e in near if guard.opposite in e.guards}
        is_start = not any(e.kind in STEPS for e in own[: own.index(event)])
        kinds = [e.kind in STEPS for e in rest[:2]]
        if is_start and kinds == [False, True] and rest[0].kind in _BACKWARDS and others and others <= {*_BACKWARDS}:
            return guard, rest[1]
    return None


def micro_batches(loop: ast.AST) -> str:
    """The number of micro-batches over which a loop runs, as the script writes it; "" for any other loop."""
    source = loop.iter if isinstance(loop, ast.For) else None
    while isinstance(source, ast.Call) and text_of(source.func).rsplit(".", 1)[-1] in _AROUND and source.args:
        source = source.args[0]
    if isinstance(source, ast.Call):
        name = text_of(source.func).rsplit(".", 1)[-1]
        if name in {"range", "trange"} and len(source.args) == 1:
            length = text_of(source.args[0])
            is_window = ACCUMULATION.search(length) or any(map(ACCUMULATION.search, targets_of(loop)))
            return length if is_window else ""
        if name == "chunk":  # torch.chunk(x, n), x.chunk(n)
            chunks = source.args[1:] if text_of(source.func) == "torch.chunk" else source.args
            return text_of(chunks[0]) if chunks else ""
        if "accumulat" in name and source.args:  # a generator of contexts: accumulate_contexts(n, ddp)
            length = text_of(source.args[0])
            return length if ACCUMULATION.search(length) else ""
        if _CHUNKS.search(name) and len(source.args) > 1:  # a helper: deep_chunk(batch, self.iter_size)
            length = text_of(source.args[-1])
            return length if ACCUMULATION.search(length) and not _SIZE.search(length) else ""
        return ""
    name = text_of(source)
    return f"len({name})" if _MICRO.search(name.rsplit(".", 1)[-1]) else ""


def contexts_before(script: Script, trace: Trace, index: int) -> list[ast.expr]:
    """The Accelerators whose `accumulate` only the forward runs in, before a clip: the count of micro-batches is the same."""
    event, outline = trace[index], script.outline
    step = next(later(trace, index, "opt_step"), None)
    if step is None or trace[step].accumulating or trace[step].function is not event.function:
        return []
    line = getattr(event.node, "lineno", 0)
    loops = [parent for parent in script.above(event.node) if isinstance(parent, (ast.For, ast.While))]
    sites = [c for c, f in outline.calls.get("accumulate", ()) if f is event.function and c.lineno < line]
    sites = [c for c in sites if isinstance(outline.parents.get(c), ast.withitem)]
    guards = conditions_of(outline, event.node)
    sites = [c for c in sites if possible(conditions_of(outline, c), guards)]
    same = [c for c in sites if [p for p in script.above(c) if isinstance(p, (ast.For, ast.While))] == loops]
    return [c.func.value for c in same if isinstance(c.func, ast.Attribute)]


def is_trial(script: Script, event: Event) -> bool:
    """Whether a loop measures instead of training: a few iterations on one batch, `for _ in range(2)`, or one per batch size."""
    loops = loops_around(script, event)
    source = loops[-1].iter if loops and isinstance(loops[-1], ast.For) else None
    is_range = isinstance(source, ast.Call) and text_of(source.func) == "range"
    if isinstance(source, ast.Call) and is_range and all(isinstance(constant(a), int) for a in source.args):
        return True
    sized = [text_of(loop.test if isinstance(loop, ast.While) else loop.target) for loop in loops]
    return any(_TRIED.search(text) for text in sized)


def window_of_clearing(script: Script, cleared: list[Event], event: Event) -> str:
    """n, where every zero_grad waits for the end of a window of n micro-batches for which a step does not."""
    lengths = [
        next((n for g in e.accumulating if g not in event.guards and (n := length_of(script, g))), "") for e in cleared
    ]
    return lengths[0] if lengths and all(lengths) else ""


def window_of_flag(script: Script, trace: Trace, index: int) -> Window | None:
    """The window of the only step in a loop, which a flag for accumulation holds back, `if not self.accumulate:`, after an event and a backward."""
    event = trace[index]
    if not event.loops or any(e.loops == event.loops and e.kind in {*STEPS, *_BACKWARDS} for e in trace[:index]):
        return None
    back, first = (next(later(trace, index, *kinds), None) for kinds in (_BACKWARDS, STEPS))
    if back is None or first is None or first < back or not trace[back].loops == event.loops == trace[first].loops:
        return None
    step = trace[first]
    flags = [g for g in step.guards if not g.is_true and _HELD_BACK.search(g.text) and g not in trace[back].guards]
    if len(flags) != 1 or flags[0] in event.guards or not only_settings(script, event, step):
        return None
    flag, loops = flags[0], loops_around(script, event)
    if any(isinstance(n, ast.Attribute) and n.attr == "grad" for loop in loops[-1:] for n in ast.walk(loop)):
        return None  # the loop uses the gradients itself
    values = script.outline.values(flag.text, step.function)
    settings = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)
    if any(not isinstance(v, settings) and not isinstance(constant(v), bool) for v in values):
        return None  # a number, or a test of this iteration
    others = [e for e in trace if e.kind in {*STEPS, "handed", "grad_read"} and flag not in e.guards]
    return None if others else Window(step, f"not `{flag.text}`", flag.text)


def window_of_loop(script: Script, event: Event) -> str:
    """n, where a step is in the body of `for micro in range(n)`, outside of which the gradients are cleared."""
    loops = loops_around(script, event)
    if len(loops) != len(event.loops) or len(loops) < 2:
        return ""
    length = micro_batches(loops[-1])
    return "" if _TOTAL.search(length) and not re.search("accum|micro", length) else length
