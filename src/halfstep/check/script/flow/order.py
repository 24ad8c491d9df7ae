"""Queries over a trace: what came before, are gradients scaled here, is this the path without AMP.

A rule over traces declares which kinds of event it judges and judges them one at a time; `TraceRule` does the rest, and
reports each place once even if several traces contain it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import ScriptRule
from halfstep.check.script.flow.event import Event, Guard, compatible, is_accumulation, is_fallback
from halfstep.check.script.flow.guard import tested_values
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.values import Scaler, argument, make_scaler, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import is_one, key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS

__all__ = [
    "STEPS",
    "TraceRule",
    "allows_float16",
    "between",
    "changes_in_loop",
    "earlier",
    "exclusive",
    "function_around",
    "implied",
    "in_other_precision",
    "in_training_step",
    "is_amp",
    "is_setting",
    "later",
    "loops_around",
    "only_settings",
    "rebound_between",
    "repeats",
    "scaled_before",
    "scalers_at",
    "scales_between",
    "switched_off",
    "together",
    "without_amp",
]

STEPS = ("scaler_step", "opt_step", "owned_step")
_AMP = regex(r"amp\b|_amp|amp_|fp16|half|mixed|scaler|precision|float16|16bit", re.IGNORECASE)
# Conditions that change within a run, whatever they are called after: the end of a window, a test of gradients.
_VARYING = regex(
    r"last|sync|final|bound|flush|now\b|should|do_|update|step|ready|skip|finite|nan|\binf|is_?inf|idx|index|count|unscal|done|"
    r"\b(i|it|iter|iteration|epoch|batch|batch_(i|num|id))\b|except@|case@",
    re.IGNORECASE,
)
# What is read from settings does not vary, whatever it is called: `args.skip_nan`, `config.training.unscale`.
_CONFIGURED = regex(r"\b(self\.)?_?(args|cfg|config|conf|hparams|opts?|flags|settings)\.[\w.]+\b(?!\()", re.IGNORECASE)
_SAME_IN_RUN = regex(r"(^|\.)(get_(world_size|rank|local_rank|device_capability)|device_count|is_available)$")
_MODE = regex(r"[A-Za-z_][\w.]* (==|in) \(?['\"\[]")
_NAME = regex(r"[A-Za-z_][\w.]*\(?")
_PURE = {
    "len(", "isinstance(", "hasattr(", "getattr(", "int(", "bool(", "float(", "str(", "type(", "lower(", "upper(",
    "torch.cuda.is_available(",
}  # fmt: skip
_AVAILABLE = regex(r"(^|\.)(is_\w*available|is_initialized|get_world_size|get_rank)\($")
# Methods that only read a setting: `conf.get("clip")`, `device.startswith("cuda")`.
_READS = regex(r"(^|\.)(startswith|endswith|lower|upper|strip|casefold)\($|\.get\($")
AnyLoop = ast.For | ast.AsyncFor | ast.While
_DEVICE = regex(r"cuda|gpu|cpu|mps|device|available", re.IGNORECASE)
_ON_GPU = regex(r"cuda|available", re.IGNORECASE)
_FLOAT16_IN = regex(r" in [\[({].*['\".](fp16|float16|half|16|16-mixed)['\"]?[^'\"]*[\])}]$")
_FP16_FLAG = regex(r"^[\w.]*(fp16|float16)$", re.IGNORECASE)
_NOT_FLOAT32 = regex(r"^[\w.\[\]'\"]+ (!= (torch\.)?['\"]?(fp32|float32|float|no|32)['\"]?|is not None)$")
# Another format than float16: where it is not chosen, float16 may be.
_OTHER_FORMAT = regex(r"^\(?[\w.\[\]'\"]+ == (torch\.)?['\"]?(bf16|bfloat16|fp8|float8|int8|bf16-mixed)\w*['\"]?\)?$")
_FULL = regex(r"fp32|float32|['\"](no|O0)['\"]|== 32|(amp|precision|fp16)\w* == ['\"](none|off)['\"]", re.IGNORECASE)


class TraceRule(ScriptRule):
    """A rule that judges events of some kinds, each with the trace that contains it."""

    kinds: ClassVar[tuple[str, ...]]

    def check(self, script: Script) -> Iterator[Finding]:
        """The findings in `script`, one per place."""
        reported: set[ast.AST] = set()
        for trace in script.traces:
            for index, event in enumerate(trace):
                if event.kind in self.kinds and event.node not in reported:
                    finding = self.judge(script, trace, index)
                    if finding is not None:
                        reported.add(event.node)
                        yield finding

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding at `trace[index]`, if there is one."""
        raise NotImplementedError


def earlier(trace: Trace, index: int, *kinds: str) -> Iterator[int]:
    """Indices of earlier events of these kinds that are compatible with `trace[index]`, nearest first."""
    for i in range(index - 1, -1, -1):
        if trace[i].kind in kinds and compatible(trace[i], trace[index]) and not _aside(trace[i], trace[index]):
            yield i


def later(trace: Trace, index: int, *kinds: str) -> Iterator[int]:
    """Indices of later events of these kinds that are compatible with `trace[index]`, nearest first."""
    for i in range(index + 1, len(trace)):
        if trace[i].kind in kinds and compatible(trace[i], trace[index]) and not _aside(trace[i], trace[index]):
            yield i


def between(trace: Trace, first: int, last: int, *kinds: str) -> list[Event]:
    """The events of these kinds between two others that are compatible with both."""
    a, b = trace[first], trace[last]
    events = (e for e in trace[first + 1 : last] if e.kind in kinds and compatible(e, a) and compatible(e, b))
    return [e for e in events if not _aside(e, a, b)]


def _aside(event: Event, *others: Event) -> bool:
    """Whether an event is inside an `except` block that contains none of the others."""
    return any(
        text.startswith("except@") and not any((text, is_true) in other.guards for other in others)
        for text, is_true in event.guards
    )


def implied(a: Event, b: Event) -> bool:
    """Whether `a` always happens when `b` does: every condition on `a` is also one on `b`."""
    return set(a.guards) <= set(b.guards)


def together(script: Script, a: Event, b: Event) -> bool:
    """Whether two events happen in one pass for some settings: whatever else they depend on, both do."""
    return compatible(a, b) and only_settings(script, a, b) and only_settings(script, b, a)


def only_settings(script: Script, a: Event, b: Event) -> bool:
    """Whether each condition on `a` that `b` does not have is a setting, or tests if mixed precision is on."""
    return all(guard in b.guards or is_amp(guard) or is_setting(script, guard, a) for guard in a.guards)


def repeats(event: Event) -> bool:
    """Whether an event may run once per batch: in a loop, or in a function that another file may call from one."""
    return bool(event.loops) or not isinstance(event.function.node, ast.Module)


def rebound_between(script: Script, a: Event, b: Event) -> bool:
    """Whether a variable that `b` tests is assigned after `a`: `done = True` and, later, `if not done:`, whether or not `a` tests it."""
    first, last = getattr(a.node, "lineno", 0), getattr(b.node, "lineno", 0)
    for guard in b.guards:
        lines = range(first + (guard in a.guards), last + 1)
        bindings = [
            x for name in _NAME.findall(guard.text) for x in script.outline.bindings.get(name, ())[:MAX_BINDINGS]
        ]
        if any(x.function is b.function and getattr(x.node, "lineno", 0) in lines for x in bindings):
            return True
    return False


def is_setting(script: Script, guard: Guard, event: Event) -> bool:
    """Whether a condition around an event is the same in every iteration: `args.clip > 0`, not `norm > 10`."""
    text = guard.text
    if is_accumulation(guard):
        return False
    if text.startswith("class@") or _is_initial(script, text):
        return True
    # `mode == "step"` is a setting whatever the variable is called.
    if not _MODE.match(text) and _VARYING.search(_CONFIGURED.sub("", re.sub(r"'[^']*'", "''", text))):
        return False
    names = _NAME.findall(re.sub(r"'[^']*'", "''", text))
    # `conf.get("clip", None)` reads a setting like `conf.clip`.
    calls = [name for name in names if name.endswith("(") and name not in _PURE]
    if any(not _READS.search(name) and not _AVAILABLE.search(name) for name in calls):
        return False
    # `device` of `device.startswith("cuda")`.
    texts = {_READS.sub("", name).partition(".")[0] for name in calls if not name.endswith(".get(")} - {"", "self"}
    keys = {key for name in names if not name.endswith("(") for key in (name, name.partition(".")[0])}
    return not any(_rebinds(script, key, event) for key in keys | texts) and not any(
        _assigns(loop, text) for text in texts for loop in _loops_of(script, event.node)
    )


def _assigns(loop: AnyLoop, name: str) -> bool:
    """Whether a loop assigns a variable, also as a copy of an entry of its batch."""
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(loop))


def _is_initial(script: Script, text: str) -> bool:
    """Whether a condition is an attribute that only `__init__` assigns: `self.step_each_batch`."""
    if text.startswith("self.") and (bound := script.outline.bindings.get(text, ())):
        return all(b.function.name == "__init__" for b in bound)
    # Conditions follow copies, so that the attribute has the name of the parameter here.
    functions = [f for f in script.outline.functions if text in f.params]
    is_attribute = any(script.outline.bindings.get(f"self.{name}") for name in (text, f"_{text}"))
    is_only_there = text.isidentifier() and text not in script.outline.bindings and is_attribute
    return is_only_there and bool(functions) and all(f.name == "__init__" for f in functions)


def _rebinds(script: Script, key: str, event: Event) -> bool:
    """Whether a variable gets a new value in the innermost loop around an event, or in a function called once per batch."""
    bindings = [b for b in script.outline.bindings.get(key, ())[:MAX_BINDINGS] if not key_of(b.value)]  # not copies
    bindings = [b for b in bindings if not _SAME_IN_RUN.search(key_of(getattr(b.value, "func", None)))]
    for place in (event.node, *reversed(event.roots)) if bindings else ():
        loops, function = _loops_of(script, place), function_around(script, place)
        lines = range(loops[-1].lineno, (loops[-1].end_lineno or 0) + 1) if loops else None
        here = [b for b in bindings if b.function.node is function]
        if any(lines is None or getattr(b.node, "lineno", 0) in lines for b in here):
            return True
        if loops or not event.loops:
            return False
    return False


def function_around(script: Script, node: ast.AST) -> ast.AST:
    """The function around a node, or the module."""
    parent = script.outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
        node, parent = parent, script.outline.parents.get(parent)
    return parent or node


def loops_around(script: Script, event: Event) -> list[AnyLoop]:
    """The loops around an event and around the calls that led to it, outermost first, as `event.loops` has them."""
    return [loop for place in (*event.roots, event.node) for loop in _loops_of(script, place)]


def _loops_of(script: Script, node: ast.AST) -> list[AnyLoop]:
    """The loops around a node in its own function, outermost first."""
    loops: list[AnyLoop] = []
    parent = script.outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if isinstance(parent, (ast.For, ast.AsyncFor, ast.While)) and any(node is s for s in parent.body):
            loops.insert(0, parent)
        node, parent = parent, script.outline.parents.get(parent)
    return loops


def in_training_step(script: Script, event: Event) -> bool:
    """Whether each training step runs an event, or the call that led to it, before its backward: the fakes for a discriminator.

    A step is a pass of a loop that evaluates nothing, or a call of a function without a loop. A loop over a number inside it,
    as of a rollout, is a part of it.
    """
    for place in (event.node, *reversed(event.roots)):
        loops = _loops_of(script, place)
        while loops and _repeats_within(loops[-1]):
            loops.pop()
        scope: ast.AST = loops[-1] if loops else function_around(script, place)
        methods = [n for n in ast.walk(scope) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        evaluates = any(text_of(n.func).endswith(".eval") for n in methods)
        backwards = [n for n in methods if text_of(n.func).endswith("backward")]
        backwards = [n for n in backwards if _loops_of(script, n)[-1:] == loops[-1:]]
        if loops or backwards:
            inner = list(script.above(place))
            # Loops evaluate now and then; a function without one has options, and switches its frozen models to evaluation.
            is_aside = evaluates or any(isinstance(n, (ast.If, ast.Try)) for n in inner[: inner.index(scope)])
            if isinstance(scope, ast.Module) or (loops and is_aside):
                return False
            return any(n.lineno > getattr(place, "lineno", 0) for n in backwards)
        if evaluates:
            return False
    return False


def _repeats_within(loop: AnyLoop) -> bool:
    """Whether a loop counts, `for t in range(horizon)`, and trains nothing itself."""
    source = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(source, ast.Call) or key_of(source.func) not in {"range", "reversed"}:
        return False
    return not any(isinstance(n, ast.Attribute) and n.attr == "backward" for n in ast.walk(loop))


def changes_in_loop(script: Script, event: Event) -> bool:
    """Whether a step's optimizer may be another in each iteration, or the step may end its loop."""
    if not is_one(event.local.optimizer) or not is_one(event.optimizer):
        return True
    loops = loops_around(script, event)
    if not loops:
        return True
    statement = script.statement(event.node)
    parent = script.outline.parents.get(statement) if statement is not None else None
    siblings = getattr(parent, "body", []) if parent is not None else []
    if any(isinstance(s, (ast.Break, ast.Return)) for s in siblings if isinstance(s, ast.stmt)):
        return True
    last = loops[-1]
    lines = range(last.lineno, (last.end_lineno or 0) + 1)
    roots = {key.partition(".")[0] for key in (event.optimizer, event.local.optimizer)} - {"self"}
    keys = roots | {event.optimizer, event.local.optimizer, event.scaler}
    bindings = [b for key in keys for b in script.outline.bindings.get(key, ())[:MAX_BINDINGS]]
    targets = (
        {n.id for n in ast.walk(last.target) if isinstance(n, ast.Name)} if not isinstance(last, ast.While) else set()
    )
    return bool(targets & roots) or any(getattr(b.node, "lineno", 0) in lines for b in bindings)


def exclusive(trace: Trace, event: Event, *kinds: str) -> bool:
    """Whether an event of these kinds is in the other branch of a condition around `event`."""
    return any(e.kind in kinds and not compatible(e, event) for e in trace)


def is_amp(guard: tuple[str, bool]) -> bool:
    """Whether a condition, a `Guard` or a pair like it, tests if mixed precision is on."""
    return bool(_AMP.search(guard[0]))


def in_other_precision(script: Script, a: ast.AST, b: ast.AST) -> bool:
    """Whether of two nodes one is where mixed precision is on, and the other in the `else` of that."""
    ways = [(a, *script.above(a)), (b, *script.above(b))]
    branch = next((n for n in ways[0] if n in ways[1]), None)
    if not isinstance(branch, ast.If) or not (is_amp((text_of(branch.test), True)) or "apex" in text_of(branch.test)):
        return False
    return len({way[way.index(branch) - 1] in branch.orelse for way in ways}) == 2


def without_amp(event: Event) -> bool:
    """Whether the conditions around an event mean that mixed precision is off, or that an exception was caught in the loop."""
    return any(_excludes_amp(guard) and not is_fallback(guard, event) for guard in event.guards)


@lru_cache(maxsize=4096)
def _excludes_amp(guard: Guard) -> bool:
    text, is_true = guard
    if text.startswith("except@"):
        return True
    full = bool(_FULL.search(text)) and not allows_float16(text)
    if not is_true and any(_OTHER_FORMAT.search(part) for part in text.split(" and ")):
        return False
    if not is_true and " and " in text and " or " not in text:
        # `use_amp and use_fsdp` is also false in a run with mixed precision; without CUDA there is none.
        parts = tested_values(text.split(" and "))
        tests = any(is_amp((part, True)) for part in parts) or all(map(_ON_GPU.search, parts))
        return not full and tests and all(is_amp((part, True)) or _DEVICE.search(part) for part in parts)
    return full if is_true else not full and is_amp(guard)


def allows_float16(text: str) -> bool:
    """Whether a condition leaves float16 among other formats: `precision in ("fp32", "fp16")`, `bf16 or fp16`, `dtype != torch.float32`."""
    either = text.split(" or ") if " and " not in text else []
    if len(either) > 1 and any(_FP16_FLAG.search(part) for part in either):
        return True
    return bool(_FLOAT16_IN.search(text) or _NOT_FLOAT32.search(text))


def scaled_before(trace: Trace, index: int) -> int | None:
    """The index of the scaled backward whose gradients `trace[index]` uses; None if they may not be scaled."""
    for i in earlier(trace, index, "backward"):
        back = trace[i]
        if back.scaled != "yes":
            continue
        # After a later backward without the scale, or cleared gradients, .grad is no longer known to be scaled.
        if between(trace, i, index, "owned_backward", "handed") or scales_between(trace, i, index):
            return None
        # One under a condition of its own, as of an adversarial loss, leaves the path without it.
        always = {*back.guards, *trace[index].guards}
        others = between(trace, i, index, "backward", "zero_grad")
        if any(e.scaled != "yes" and always.issuperset(e.guards) for e in others):
            return None
        return i
    return None


def scales_between(trace: Trace, first: int, last: int) -> bool:
    """Whether the scale is read between two events in a way that may multiply or divide gradients."""
    return any(e.scaled != "no" for e in between(trace, first, last, "get_scale"))


def scalers_at(script: Script, event: Event) -> list[Scaler]:
    """The scalers an event's variable may be: one created in the arguments of the call to here, or those of that name."""
    function = event.function
    if event.roots and event.scaler in function.params:
        position = function.params.index(event.scaler) - (function.method and function.params[0] in {"self", "cls"})
        call = event.roots[-1]
        value = argument(call, position, event.scaler) if isinstance(call, ast.Call) else None
        scaler = make_scaler(script.outline, value, function) if isinstance(value, ast.Call) else None
        if scaler is not None:
            return [scaler]
    named = script.scalers_named(event.scaler)
    if not named and event.scaler.isidentifier():  # `scaler = self.grad_scaler`
        values = script.outline.values(event.scaler, function)
        named = [s for s in script.scalers if any(s.node is value for value in values)]
    # A local variable is the one of its function, however many functions have a variable of that name.
    own = [s for s in named if s.function is function and s.key == event.scaler] if function.parent is not None else []
    return own or named


def switched_off(script: Script, event: Event) -> bool:
    """Whether the scaler of an event is created with enabled=False, so that it does nothing, or is always None."""
    scalers = scalers_at(script, event)
    if scalers:
        return all(s.enabled == "no" for s in scalers)
    values = script.outline.values(event.scaler, event.function) if event.scaler else []
    return bool(values) and all(isinstance(value, ast.Constant) and value.value is None for value in values)
