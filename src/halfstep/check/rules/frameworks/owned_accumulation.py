"""HS188: gradient accumulation that both the script and the framework do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import takewhile

from halfstep.check.config.engines import read_engines
from halfstep.check.finding import Finding, Severity
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.accumulated import STEPS, is_entry, is_length_of_loop, same_steps, steps_name
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import earlier, loops_around
from halfstep.check.script.objects.engines import ACCELERATE, Engine, engine_at, loop_class
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.scaling.loss_divisors import Divisor, divisors_of, divisors_returned
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import statements_in
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_ACCELERATE = """\
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=args.accumulation_steps)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = loss_fn(model(x), y){divided}
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
_DEEPSPEED = """\
import deepspeed

ds_config = {{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "bf16": {{"enabled": True}}}}
engine, _, _, _ = deepspeed.initialize(model=model, config=ds_config)
for i, (x, y) in enumerate(loader):
    loss = loss_fn(engine(x), y)
    engine.backward(loss{divided})
{step}
"""
_NESTED = """\
import deepspeed

engine, _, _, _ = deepspeed.initialize(model=model, config="ds_config.json")
for step in range(num_steps):
    for micro in range(engine.gradient_accumulation_steps()):
        loss = engine(next(batches))
        engine.backward(loss)
{after}
"""
_PARTS = """\
import deepspeed
import json

ds_config = json.load(open("ds.json"))
ds_config["gradient_accumulation_steps"] = args.parts
engine, _, _, _ = deepspeed.initialize(model=model, config=ds_config)
for batch in loader:
    parts = split(batch)
    for x in parts:
        loss = engine(x){divided}
        engine.backward(loss)
        engine.step()
"""
_STEP = "    engine.step()"
_STEPS = regex(r"accum|grad_acc|acc_steps|^gas$", re.IGNORECASE)
_DEEPSPEED_KEYS = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "fp16", "bf16"}
_BATCHES = "accumulate_grad_batches"
_BOUNDARY = "is_gradient_accumulation_boundary"


class AccumulatedTwice(ScriptRule):
    """The script divides the loss by the accumulation steps, or counts them, although the framework does."""

    code = "HS188"
    name = "accumulated-twice"
    severity = "warning"
    reason = (
        "`accelerator.backward` divides the loss by the gradient_accumulation_steps of the Accelerator, and DeepSpeed's "
        "`engine.backward` by those of its configuration. A second division makes the gradients N times too small: Adam hides most of "
        "it, but clipping, weight decay, SGD and the smallest fp16 gradients do not. `engine.step` counts micro-batches too: called "
        "only on every N-th one, it updates the weights on every N*N-th."
    )
    bad = (
        _ACCELERATE.format(divided=" / args.accumulation_steps"),
        _DEEPSPEED.format(divided=" / 8", step=_STEP),
        _DEEPSPEED.format(divided="", step="    if (i + 1) % 8 == 0:\n        engine.step()"),
        _NESTED.format(after=_STEP),
        _PARTS.format(divided=" / max(len(parts), 1)"),
    )
    good = (
        _ACCELERATE.format(divided=""),
        _DEEPSPEED.format(divided="", step=_STEP),
        _DEEPSPEED.format(divided="", step=_STEP),
        _NESTED.format(after=f"    {_STEP}"),
        _PARTS.format(divided=""),
        _PARTS.format(divided=" / len(parts)").replace("args.parts", "1"),
    )
    references = (
        "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation",
        "https://www.deepspeed.ai/getting-started/",
        "measured: source code of accelerate 1.15.0 and DeepSpeed 0.19.8, backward and step",
    )
    words = ("Accelerator", "deepspeed.initialize", "gradient_accumulation_steps()", "accumulate_grad_batches")

    def check(self, script: Script) -> Iterator[Finding]:
        """Divided losses passed to an engine's backward, and engine steps under a window's condition."""
        engines = _deepspeed_engines(script)
        steps = _configured_steps(script) if engines else None
        for call, function in script.outline.calls.get("backward", ()):
            owner = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            engine = engine_at(script, owner, function) if owner else None
            if engine is None and owner not in engines:
                continue
            for divisor in divisors_of(script, call, function):
                reports: list[Finding] = []
                if engine is not None and engine.library == ACCELERATE:
                    reports = [*self._accelerate(script, call, engine, divisor)]
                elif owner in engines:
                    reports = [*self._deepspeed(script, call, owner, divisor, steps)]
                yield from reports
                if reports:
                    break
        yield from self._steps(script, engines, steps)
        yield from self._lightning(script)

    def _lightning(self, script: Script) -> Iterator[Finding]:
        """Losses that `training_step` divides, although Lightning divides what it returns."""
        for function in script.outline.functions if _BATCHES in script.source.text else ():
            owner = loop_class(script, function.cls) if function.name == "training_step" and function.cls else None
            if owner is None or owner.base != "automatic":
                continue
            for value, divisor in divisors_returned(script, function, "loss"):
                if _is_of_trainer(script, divisor):
                    yield self.finding(
                        script.where(_division(script, divisor, value)),
                        f"the loss is divided by `{text_of(divisor.value)}`, and Lightning divides what `training_step` returns again",
                        instead="return the undivided loss",
                    )

    def _accelerate(self, script: Script, call: ast.Call, engine: Engine, divisor: Divisor) -> Iterator[Finding]:
        own = f"{engine.key}.{STEPS}"
        text = text_of(divisor.value)
        if constant(engine.steps) == 1 or (
            text != own and not _is_same(script, divisor, engine.steps, engine.function)
        ):
            return
        yield self.finding(
            script.where(_division(script, divisor, call)),
            f"the loss is divided by `{text}`, and `{engine.key}.backward` divides by its {STEPS} again",
            instead=f"pass the undivided loss to `{engine.key}.backward`",
        )

    def _deepspeed(
        self, script: Script, call: ast.Call, engine: str, quotient: Divisor, steps: ast.expr | None
    ) -> Iterator[Finding]:
        if any(k.arg == "scale_wrt_gas" for k in call.keywords):
            return
        divisor, function = quotient.value, quotient.function
        is_asked = constant(steps) != 1 and _is_configured(script, divisor, steps, function, is_engine=True)
        text = text_of(divisor)
        # `config["gradient_accumulation_steps"]` and `engine.gradient_accumulation_steps()` are the configured number.
        is_certain = is_asked or (
            steps is not None
            and constant(steps) != 1
            and (is_entry(divisor) or same_steps(divisor, steps) or is_length_of_loop(script, divisor, call))
        )
        is_named = bool(_STEPS.search(steps_name(divisor))) and steps is None
        # A script that steps on every micro-batch leaves the counting to the engine.
        if not is_certain and not (is_named and _steps_always(script, engine)):
            return
        condition = "" if is_certain else f" if the configuration sets {STEPS}"
        severity: Severity = "warning" if is_certain else "advice"
        yield self.finding(
            script.where(_division(script, quotient, call)),
            f"the loss is divided by `{text}`, and `{engine}.backward` divides again{condition}",
            instead=f"pass the undivided loss to `{engine}.backward`",
            severity=severity,
        )

    def _steps(self, script: Script, engines: set[str], steps: ast.expr | None) -> Iterator[Finding]:
        """Engine steps that come once per window: after a loop over its micro-batches, or under a condition."""
        if constant(steps) == 1 or "set_gradient_accumulation_boundary" in script.outline.calls:
            return
        reported: set[ast.AST] = set()
        names = {last_name(engine) for engine in engines}
        for trace in script.traces:
            for index, event in enumerate(trace):
                before = next(earlier(trace, index, "owned_backward"), None) if event.kind == "engine_step" else None
                back = trace[before] if before is not None else event
                place = _parting(event, back)
                if back is event or place in reported or last_name(back.subject) != last_name(event.subject):
                    continue
                window = _window(script, place) or _looped_over(script, event, back)
                name = last_name(event.subject)
                if window is None or not _is_configured(script, window, steps, event.function, is_engine=name in names):
                    continue
                reported.add(place)
                call = text_of(place.func) if isinstance(place, ast.Call) else f"{event.local.subject}.step"
                length = text_of(window)
                effect = f"called once per `{length}` of them, it updates the weights once per `{length}` calls"
                if _BOUNDARY in length:
                    effect = "without a call on every one it never reaches the end of a window"
                yield self.finding(
                    script.where(place),
                    f"`{call}()` counts micro-batches itself: {effect}",
                    instead=f"call `{call}()` after every backward",
                    severity="error",
                )


def _is_same(script: Script, divisor: Divisor, steps: ast.expr | None, function: Function | None) -> bool:
    """Whether a loss is divided by the number that an engine is created with, also where one of the two is a copy."""
    if steps is None or function is None:
        return False
    numbers = _forms(script, steps, function)
    is_one = any(constant(number) == 1 for number in numbers)
    return not is_one and any(
        same_steps(a, b) for a in _forms(script, divisor.value, divisor.function) for b in numbers
    )


def _forms(script: Script, value: ast.expr, function: Function) -> list[ast.expr]:
    """An expression, and the one value of a variable: `steps` and `8` after `steps = 8`."""
    values = script.outline.values(key_of(value), function) if key_of(value) else []
    return [value, *(values if len(values) == 1 else ())]


def _is_of_trainer(script: Script, divisor: Divisor) -> bool:
    """Whether a loss is divided by the batches that the Trainer of Lightning accumulates."""
    if text_of(divisor.value) == f"self.trainer.{_BATCHES}":
        return True
    trainers = [site for site in script.outline.calls.get("Trainer", ()) if _STEPS.search(steps_name(divisor.value))]
    steps = [(argument(call, None, _BATCHES), function) for call, function in trainers]
    return bool(steps) and all(_is_same(script, divisor, number, function) for number, function in steps)


def _parting(event: Event, other: Event) -> ast.AST:
    """The call at which the way to an event parts from that to another one: the event itself in the same function."""
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(event.roots, other.roots, strict=False)))
    return event.roots[shared] if shared < len(event.roots) else event.node


def _looped_over(script: Script, step: Event, back: Event) -> ast.expr | None:
    """n of `for micro in range(n)`, if a backward is in that loop and the step after it."""
    loops = loops_around(script, back)
    if back.loops[: len(step.loops)] != step.loops or len(loops) != len(back.loops) or len(loops) <= len(step.loops):
        return None
    loop = loops[len(step.loops)]
    source = loop.iter if isinstance(loop, ast.For) else None
    while isinstance(source, ast.Call) and source.args and last_name(text_of(source.func)) in {"tqdm", "enumerate"}:
        source = source.args[0]
    is_range = isinstance(source, ast.Call) and last_name(text_of(source.func)) in {"range", "trange"}
    return source.args[-1] if isinstance(source, ast.Call) and is_range and source.args else None


def _is_configured(
    script: Script, window: ast.expr, steps: ast.expr | None, function: Function, *, is_engine: bool
) -> bool:
    """Whether the length of a window is certainly the number of micro-batches that the engine counts itself."""
    if is_engine and steps is not None and same_steps(window, steps):
        return True
    if _BOUNDARY in text_of(window):
        return steps is not None
    for value in (window, *script.outline.values(key_of(window), function)):
        asked = value.func if isinstance(value, ast.Call) else None
        if isinstance(asked, ast.Attribute) and asked.attr == STEPS:
            return True  # engine.gradient_accumulation_steps()
        if is_entry(value) and is_engine and (steps is not None or _owner(value) in _configurations(script)):
            return True
    return False


def _owner(entry: ast.expr) -> str:
    """`config` of `config["gradient_accumulation_steps"]` or `config.get(...)`."""
    if isinstance(entry, ast.Call):
        return key_of(entry.func.value) if isinstance(entry.func, ast.Attribute) else ""
    return key_of(entry.value) if isinstance(entry, ast.Subscript) else ""


def _configurations(script: Script) -> set[str]:
    """The variables that are passed to deepspeed.initialize as the configuration."""
    calls = [call for call, _ in script.outline.library_calls.get("deepspeed.initialize", ())]
    options = [argument(call, None, name) for call in calls for name in ("config", "config_params")]
    return {key_of(option) for option in options} - {""}


def _division(script: Script, divisor: Divisor, call: ast.expr) -> ast.AST:
    """The statement that divides the loss; the call of backward, where a function that it calls divides it."""
    one, other = (
        next((n for n in script.above(node) if isinstance(n, ast.FunctionDef)), None) for node in (divisor.value, call)
    )
    return (script.statement(divisor.value) if one is other or divisor.is_above else None) or call


def _deepspeed_engines(script: Script) -> set[str]:
    """The variables that are engines of DeepSpeed: created, returned by a helper, or passed to a function."""
    if "deepspeed.initialize" not in script.outline.library_calls:
        return set()
    keys = read_engines(tuple(ast.walk(script.tree)), script.outline.names).keys
    return set().union(*keys.values())


def _configured_steps(script: Script) -> ast.expr | None:
    """The steps of the one DeepSpeed configuration that is written in the script; None if there is none."""
    steps = [
        value
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Dict) and {constant(k) for k in node.keys} & _DEEPSPEED_KEYS
        for key, value in zip(node.keys, node.values, strict=True)
        if constant(key) == STEPS
    ]
    steps += [
        node.value
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Subscript) and constant(target.slice) == STEPS
    ]
    return steps[0] if len(steps) == 1 else None


def _steps_always(script: Script, engine: str) -> bool:
    calls = [
        call
        for call, _ in script.outline.calls.get("step", ())
        if isinstance(call.func, ast.Attribute) and key_of(call.func.value) == engine
    ]
    return bool(calls) and all(_window(script, call) is None for call in calls)


def _is_counter(script: Script, variable: ast.expr, node: ast.AST) -> bool:
    """Whether the function of a node counts with a variable: `micro += 1`."""
    function = next((n for n in script.above(node) if isinstance(n, ast.FunctionDef)), script.tree)
    counted = (n for n in statements_in(function) if isinstance(n, ast.AugAssign))
    return any(key_of(n.target) == key_of(variable) != "" for n in counted)


def _window(script: Script, node: ast.AST) -> ast.expr | None:
    """The length of the window at whose end a call runs: n of `if (i + 1) % n == 0`."""
    child, parent = node, script.outline.parents.get(node)
    while parent is not None and not isinstance(parent, ast.FunctionDef):
        if isinstance(parent, ast.If) and child in parent.body:
            for part in ast.walk(parent.test):
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
                    return part.right
                if isinstance(part, ast.Call) and text_of(part.func).endswith(f".{_BOUNDARY}"):
                    return part
                is_count = isinstance(part, ast.Compare) and isinstance(part.ops[0], (ast.Eq, ast.GtE))
                if is_count and isinstance(part, ast.Compare) and _is_counter(script, part.left, node):
                    return part.comparators[0]  # n of `if micro == n`
        child, parent = parent, script.outline.parents.get(parent)
    return None


RULES: tuple[type[Rule], ...] = (AccumulatedTwice,)
