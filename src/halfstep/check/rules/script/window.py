"""HS106-HS107: calls of the scaler that belong once per accumulation window."""

from __future__ import annotations

import ast

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event, Guard, is_accumulation
from halfstep.check.script.flow.order import STEPS, TraceRule, earlier, implied, switched_off, without_amp
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import window_of
from halfstep.check.script.objects.engines import ACCELERATE, Engine, engine_at
from halfstep.check.script.objects.expressions import arguments_of, options_of
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.scaling.prepared import prepared_for
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["RULES"]

_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_START = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y) / accumulate
    scaler.scale(loss).backward()
"""
_GROUPS = (
    _START.replace(" / accumulate", "")
    + """\
    ready = [g for g in optimizers.groups{tested}]
    optimizers.scaler_step_some(scaler, ready)
    scaler.update()
"""
)
_RIGHT = (
    _START
    + """\
    if (i + 1) % accumulate == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
)


class UnscaleEveryMicroBatch(TraceRule):
    """Gradients are unscaled on every micro-batch instead of once per accumulation window."""

    code = "HS106"
    name = "unscale-every-micro-batch"
    severity = "error"
    reason = (
        "`unscale_` may be called once between two updates, so it raises RuntimeError on the second micro-batch. If `update()` "
        "also runs each time, unscaled gradients are added to scaled ones that are larger by the scale, which starts at 65536."
    )
    bad = (
        _START
        + "    scaler.unscale_(optimizer)\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        + "    if (i + 1) % accumulate == 0:\n        scaler.step(optimizer)\n        scaler.update()\n        optimizer.zero_grad()\n",
    )
    good = (_RIGHT,)
    references = (f"{_DOCS}#gradient-accumulation", "https://github.com/microsoft/Swin-Transformer/issues/311")
    kinds = ("unscale",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An unscale_ in every iteration of a loop that does not step in every iteration."""
        event = trace[index]
        window = window_of(script, trace, index)
        if window is None or without_amp(event):
            return None
        scaler = event.local.scaler
        return self.finding(
            script.where(event.node),
            f"`{scaler}.unscale_` runs on every micro-batch, but the step of line {window.line(script)} runs only when "
            f"{window.ends}: the second call raises RuntimeError",
            instead="move unscale_ (and clipping) into the condition of the step",
        )


class UpdateEveryMicroBatch(TraceRule):
    """The scaler is updated on every micro-batch instead of once per accumulation window."""

    code = "HS107"
    name = "update-every-micro-batch"
    severity = "error"
    reason = (
        "`update()` on a micro-batch without a step raises AssertionError: No inf checks were recorded prior to update. "
        "If it did change the scale, gradients with different scales would be added up in one window. Inside `accelerator.accumulate` "
        "the prepared optimizer steps only at the end of a window, but `step` of a separate scaler unscales on every micro-batch: the "
        "gradients of the earlier ones are divided by the scale again and vanish."
    )
    bad = (
        _START
        + "    if (i + 1) % accumulate == 0:\n        scaler.step(optimizer)\n        optimizer.zero_grad()\n    scaler.update()\n",
        _GROUPS.format(tested=" if i % every[g] == every[g] - 1"),
    )
    good = (
        _START
        + "    if (i + 1) % accumulate == 0:\n        scaler.step(optimizer)\n        optimizer.zero_grad()\n        scaler.update()\n",
        _RIGHT,
        _GROUPS.format(tested=""),
    )
    references = (f"{_DOCS}#gradient-accumulation",)
    kinds = ("update",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An update in every iteration of a loop that does not step in every iteration."""
        event = trace[index]
        window = window_of(script, trace, index)
        if without_amp(event):
            return None
        if window is None:
            return self._in_accumulate(script, trace, index) or self._of_some(script, trace, index)
        unscales = [e for e in trace if e.kind == "unscale" and e.loops == event.loops]
        if not all(any(g not in event.guards for g in e.accumulating) for e in unscales):
            return None  # an unscale_ each time records an inf check; HS106 reports it
        return self.finding(
            script.where(event.node),
            f"`{event.local.scaler}.update()` runs on every micro-batch, but the step of line {window.line(script)} runs only when "
            f"{window.ends}: update() without a step raises AssertionError",
            instead="move update() into the condition of the step",
        )

    def _in_accumulate(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a scaler of the script's own that steps and is updated on every micro-batch of `accelerator.accumulate`."""
        event = trace[index]
        entered = [r.node for r in event.regions if isinstance(r.node, ast.Call)]
        contexts = [c for c in entered if isinstance(c.func, ast.Attribute) and c.func.attr == "accumulate"]
        if not contexts:
            return None
        steps = (
            trace[i] for i in earlier(trace, index, "scaler_step", "owned_step") if trace[i].scaler == event.scaler
        )
        step = next(steps, None)
        if step is None or not any(r.node is contexts[-1] for r in step.regions):
            return None
        owner = key_of(contexts[-1].func.value) if isinstance(contexts[-1].func, ast.Attribute) else ""
        engine = engine_at(script, owner, event.function)
        if engine is None or not engine.is_created or engine.library != ACCELERATE or engine.plugin:
            return None
        number = constant(engine.steps) if engine.steps is not None else 1
        tests = [g for e in (step, event) for g in e.guards if "sync" in g.text or is_accumulation(g)]
        if number == 1 or tests or switched_off(script, event) or not _is_scaler(script, event):
            return None
        if not _is_prepared(script, step, engine):
            return None
        scaler = event.local.scaler
        return self.finding(
            script.where(event.node),
            f"`{scaler}.update()` runs on every micro-batch inside `{text_of(contexts[-1].func)}`: `{scaler}.step` unscales the sum each time, "
            "but the prepared optimizer waits for the end of the window: earlier gradients are divided by the scale again",
            instead=f"step and update only `if {owner}.sync_gradients`",
            severity=None if isinstance(number, int) else "warning",
        )

    def _of_some(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for an update after a call that steps, with this scaler, only the optimizers whose windows end."""
        event = trace[index]
        if not script.has("handed", "owned_step"):
            return None
        before = next((trace[i] for i in earlier(trace, index, "handed", "backward", *STEPS)), None)
        call = before.node if before is not None and before.kind in {"handed", "owned_step"} else None
        if before is None or not isinstance(call, ast.Call) or "step" not in last_name(key_of(call.func)):
            return None
        keys = [key_of(value) for value in arguments_of(call)]
        is_near = before.loops == event.loops and before.function is event.function and implied(event, before)
        if event.local.scaler not in keys or not is_near:
            return None
        for key in keys:
            values = script.outline.values(key, event.function) if key else []
            test = _filter_of(values[0]) if len(values) == 1 else ""
            if test:
                return self.finding(
                    script.where(event.node),
                    f"`{event.local.scaler}.update()` runs in every iteration, but line {script.where(call).line} steps only the optimizers in "
                    f"`{key}` (`{test}`): the scale changes inside the windows of the others, and without any step update() raises "
                    "AssertionError",
                    instead="the same window for every optimizer, with update() after its steps",
                    severity="warning",
                )
        return None


def _is_scaler(script: Script, event: Event) -> bool:
    """Whether a variable is a GradScaler, of torch or of a module of the project's own."""
    values = [part for v in script.outline.values(event.scaler, event.function) for part in options_of(v)]
    return any(last_name(key_of(v.func)).endswith("GradScaler") for v in values if isinstance(v, ast.Call))


def _is_prepared(script: Script, step: Event, engine: Engine) -> bool:
    """Whether the optimizer of `scaler.step(optimizer)` went through `prepare`, here or in a function that is passed the Accelerator."""
    value = argument(step.node, 0, "optimizer") if isinstance(step.node, ast.Call) else None
    key = key_of(value)
    if not key or last_name(key) in prepared_for(script, engine.library, step).names:
        return bool(key)
    made = [b.value for b in script.outline.lookup(key, step.function) if isinstance(b.value, ast.Call)]
    return bool(made) and all(engine.name in {last_name(key_of(part)) for part in arguments_of(v)} for v in made)


def _filter_of(value: ast.expr) -> str:
    """The test by which a list comprehension selects what is at the end of its window; "" for any other value."""
    tests = [test for g in value.generators for test in g.ifs] if isinstance(value, ast.ListComp) else []
    texts = [text_of(test) for test in tests]
    return next((text for text in texts if "%" in text and is_accumulation(Guard(text, is_true=True))), "")


RULES: tuple[type[Rule], ...] = (UnscaleEveryMicroBatch, UpdateEveryMicroBatch)
