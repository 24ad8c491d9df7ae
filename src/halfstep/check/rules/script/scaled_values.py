"""HS110, HS111: gradients and losses that are read while they are multiplied by the loss scale."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from halfstep.check.examples import MANUAL_LOOP
from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.rules.scaler.bf16 import ScalerWithBf16
from halfstep.check.rules.scaler.calls import framework_precisions
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.gradients import measured_when, skipped_unscale, unscaled_between, unstepped_when
from halfstep.check.script.flow.order import (
    TraceRule,
    earlier,
    later,
    scaled_before,
    scales_between,
    switched_off,
    without_amp,
)
from halfstep.check.script.flow.run_format import fp16_training
from halfstep.check.script.flow.trace import Trace, with_own_scaler
from halfstep.check.script.objects.engines import ACCELERATE, engine_at, loop_class, scaling_hooks, trains_in_fp16
from halfstep.check.script.objects.tensors import SHOWS_GRADIENTS, is_gradient, reads_gradients
from halfstep.check.script.objects.trainers import is_trainer
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.scaling.hooked_gradients import measuring_hooks
from halfstep.check.script.scaling.tested_norms import only_normalizes, only_tested
from halfstep.check.script.scaling.watched import WATCH, logs_gradients, watched_by_environment
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_SHORT = 40  # characters of an expression that a message quotes
_SCALE_NAME = regex(r"loss_?scale$", re.IGNORECASE)

_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_START = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
"""
_WATCHED = (
    "import wandb\n"
    + _START.replace("for i,", "wandb.watch(model, log='{log}')\nfor i,")
    + "    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()\n"
)
_MANUAL = MANUAL_LOOP.replace("{imports}", "").replace("{change}", "{read}")
_READ = 'self.log("norm", self.head.weight.grad.norm())'
_HOOK = f"\n    def on_before_optimizer_step(self, optimizer):\n        {_READ}\n"
_HOOKS = {
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "on_before_zero_grad",
}  # Lightning has unscaled here


_MEASURES = {"norm", "abs", "square", "pow", "mean", "max", "std"}


class ScaledGradientsRead(TraceRule):
    """Gradients are read or modified while still multiplied by the loss scale."""

    code = "HS110"
    name = "scaled-gradients-read"
    severity = "warning"
    reason = (
        "Between the scaled backward and `unscale_` every `.grad` is multiplied by the scale, which starts at 65536: a norm that is "
        "logged or compared with a threshold is wrong by that factor and jumps whenever the scale changes, and a clamp cuts off "
        "nearly everything. Micro-batches without a step never unscale theirs. The hooks of `wandb.watch` log the scaled gradients."
    )
    bad = (
        _START + "    plot_grad_flow(model.named_parameters())\n    scaler.step(optimizer)\n    scaler.update()\n",
        _START
        + "    total = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5\n    scaler.step(optimizer)\n    scaler.update()\n",
        _START
        + "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float('inf'))\n    log(norm)\n    scaler.step(optimizer)\n"
        + "    scaler.update()\n",
        _MANUAL.format(read=f"        {_READ}\n", hook=""),
        _WATCHED.format(log="all"),
    )
    good = (
        _START
        + "    scaler.unscale_(optimizer)\n    total = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5\n"
        + "    scaler.step(optimizer)\n    scaler.update()\n",
        _START
        + "    scaler.unscale_(optimizer)\n"
        + "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float('inf'))\n    log(norm)\n    scaler.step(optimizer)\n"
        + "    scaler.update()\n",
        _MANUAL.format(read="", hook=_HOOK),
        _WATCHED.format(log="parameters"),
    )
    references = (
        f"{_DOCS}#working-with-unscaled-gradients",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/9205",
    )
    words = (
        "Accelerator",
        "Fabric(",
        "automatic_optimization",
        "on_after_backward",
        "on_train_batch_end",
        ".watch(",
        WATCH,
        "_hook(",
    )
    lines = ("wandb.init",)
    kinds = ("grad_read", "clip")

    def check(self, script: Script) -> Iterator[Finding]:
        """Reads after a scaled backward, and in hooks of Lightning that run before its step unscales."""
        yield from super().check(script)
        for call in _watching(script):
            yield self.finding(
                script.where(call),
                f"`{text_of(call.func)}` logs gradients in hooks of the backward, where they are multiplied by the loss scale",
                instead="log='parameters', and log the norm of the gradients after they are unscaled",
            )
        for node in watched_by_environment(script) if _has_fp16_trainer(script) else ():
            yield self.finding(
                script.where(node),
                f"with `{WATCH}` the Trainer's callback logs gradients in hooks of the backward, where they are multiplied by the loss scale",
                instead=f"{WATCH}=parameters, or leave it out: the Trainer logs the norm of the unscaled gradients",
            )
        for node, what in measuring_hooks(script) if _scales(script) else ():
            yield self.finding(
                script.where(node),
                f"`{what}` runs in a hook of the backward pass, where gradients are multiplied by the loss scale",
                instead="read or change the gradients after scaler.unscale_(optimizer)",
            )
        hooks = scaling_hooks(script) if "ightning" in script.source.text else {}
        for function, reason in hooks.items():
            read = next((n for n in ast.walk(function.node) if _measures_gradient(script, n, function)), None)
            if read is not None and "scale" not in ast.unparse(function.node):
                yield self.finding(
                    script.where(read),
                    f"gradients are measured in `{function.name}`, where precision='16-mixed' leaves them multiplied by the loss scale{reason}",
                    instead="measure them in `on_before_optimizer_step`, where they are unscaled",
                )

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A gradient read or a norm measured after a scaled backward without unscale_ in between."""
        trace = with_own_scaler(trace)
        event = trace[index]
        measured = measured_when(script, event) if event.kind == "clip" else ()
        if without_amp(event) or measured is None:
            return None
        start = scaled_before(trace, index)
        if start is None:
            return self._owned(script, trace, index)
        if measured:
            if not unscaled_between(script, trace, start, index):
                return None  # HS104 reports the clip, with any limit
            event = replace(event, guards=(*event.guards, *measured))
            trace = (*trace[:index], event, *trace[index + 1 :])
        window = unstepped_when(script, trace, start, index)
        if window is not None:
            event = replace(event, guards=(*event.guards, window))
            trace = (*trace[:index], event, *trace[index + 1 :])
        if switched_off(script, trace[start]) or unscaled_between(script, trace, start, index):
            return None
        steps = [i for i in later(trace, index, "scaler_step") if trace[i].scaler == trace[start].scaler]
        is_between = not steps and _between_steps(trace, index, trace[start].scaler)
        if not (steps or is_between) or only_normalizes(script, event) or only_tested(script, event):
            return None
        if steps and scales_between(trace, start, steps[0]):
            return None  # what is measured is divided by `scaler.get_scale()`
        unless = skipped_unscale(script, trace, start, index)
        for condition in (*measured[:1], *([window] if window else [])):
            unless = f"not {condition.text}" if condition.is_true else condition.text
        # A helper that measures gradients is right; the call that comes too early is not.
        depth = len(trace[start].roots)
        helper = event.roots[depth] if event.roots[:depth] == trace[start].roots and len(event.roots) > depth else None
        action = f"`{text_of(helper.func)}` reads `.grad`" if isinstance(helper, ast.Call) else _read(event)
        return self.finding(
            script.where(helper or event.node),
            f"{action} while gradients are still multiplied by the scale of `{trace[start].scaler}`"
            + (f", unless `{unless}`" if unless else ""),
            # A second unscale_ in one window raises.
            instead="measure it where the optimizer steps, after unscale_"
            if is_between
            else f"call {trace[start].scaler}.unscale_(optimizer) first",
        )

    def _owned(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding after a framework's backward: it unscales the gradients only in its own clipping and step."""
        event = trace[index]
        before = next(earlier(trace, index, "backward", "owned_backward", "owned_clip", "opt_step", "zero_grad"), None)
        if (
            before is None
            or trace[before].kind != "owned_backward"
            or next(later(trace, index, "opt_step"), None) is None
        ):
            return None
        if isinstance(event.node, ast.Assign) or event.function.name in _HOOKS:
            return None
        if script.outline.calls.keys() & {"unscale_gradients", "unscale_"}:
            return None
        back = trace[before]
        owner = loop_class(script, event.function.cls) if event.function.cls else None
        engine = engine_at(script, back.local.subject, back.function)
        if owner is not None and owner.base == "manual" and back.subject == "self":
            precision, state = owner.precision, "with precision='16-mixed' "
            instead = "read them in `on_before_optimizer_step`"
        elif owner is None and engine is not None and engine.is_created:
            precision, state = engine.precision, "in fp16 "
            instead = f"call {engine.key}.clip_grad_norm_ first, which unscales and returns the norm"
            if engine.library != ACCELERATE:
                instead = f"call {engine.key}.clip_gradients first, which unscales and returns the norm"
        else:
            return None
        if precision not in {"fp16", "?"} or only_tested(script, event):
            return None
        if precision == "?" and script.autocasts and all(a.dtype == "bfloat16" for a in script.autocasts):
            return None  # the file computes in bfloat16
        state = "" if precision == "fp16" else state
        return self.finding(
            script.where(event.node),
            f"{state}{_read(event)} while gradients are still multiplied by the loss scale, until the step unscales them",
            instead=instead,
        )


def _watching(script: Script) -> Iterator[ast.Call]:
    """The calls of W&B that log gradients in a script that scales its loss: wandb.watch, also of a run or of Lightning's logger."""
    sites = script.outline.calls.get("watch", ())
    owned = sites and (
        framework_precisions(script) == {"float16"} or trains_in_fp16(script) or _has_fp16_trainer(script)
    )
    if not sites or not (owned or _scales(script)):
        return
    yield from (call for call, function in sites if logs_gradients(script, call, function))


def _has_fp16_trainer(script: Script) -> bool:
    """Whether a Trainer of Hugging Face trains here with `fp16=True`: Accelerate or DeepSpeed then scales its loss."""
    names = [name for name in script.outline.calls if is_trainer(script.outline, name)]
    return bool(names) and "train" in script.outline.calls and fp16_training(script) is not None


def _scales(script: Script) -> bool:
    """Whether a scaler that may be enabled steps an optimizer, and bfloat16 does not make it useless."""
    idle = {s.key.rsplit(".", 1)[-1] for s in ScalerWithBf16.idle(script)}
    steps = [e for e in script.events("scaler_step") if script.scalers_named(e.scaler) and not without_amp(e)]
    return any(e.scaler.rsplit(".", 1)[-1] not in idle and not switched_off(script, e) for e in steps)


def _measures_gradient(script: Script, node: ast.AST, function: Function) -> bool:
    """Whether a call computes a norm or another number of a gradient: `p.grad.norm()`, `torch.norm(p.grad)`."""
    if not isinstance(node, ast.Call):
        return False
    name = script.outline.names.full(node.func)
    if isinstance(node.func, ast.Attribute) and not name:
        return node.func.attr in _MEASURES and is_gradient(script.outline, node.func.value, function)
    last = (name or key_of(node.func)).rsplit(".", 1)[-1]
    return reads_gradients(script.outline, node, function, name, last)


def _between_steps(trace: Trace, index: int, scaler: str) -> bool:
    """Whether an event runs on the micro-batches of a window that do not step: in the `else` of `if (i + 1) % n == 0:`."""
    event = trace[index]
    steps = [e for e in trace if e.kind == "scaler_step" and e.scaler == scaler and e.loops]
    steps = [e for e in steps if event.loops[: len(e.loops)] == e.loops]
    return any(guard.opposite in e.guards for guard in event.accumulating for e in steps)


def _read(event: Event) -> str:
    """What an event reads, in words."""
    if (event.subject.endswith(("norm", "norm_")) and not SHOWS_GRADIENTS.match(event.subject)) or event.kind == "clip":
        return _measured(event)
    if SHOWS_GRADIENTS.match(event.subject):
        return f"`{event.subject}` reads `.grad`"
    is_changed = event.subject.endswith("_") or not isinstance(event.node, ast.Call)
    return "`.grad` is changed" if is_changed else "`.grad` is read"


def _measured(event: Event) -> str:
    """Whose norm an event measures: the tensor of `p.grad.norm()`, or the function that reads all gradients."""
    call = event.node
    if event.subject not in {"norm", "vector_norm"} or not isinstance(call, ast.Call):
        return f"`{event.subject}` measures the norm"
    owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    texts = [text for part in (*owner, *call.args) if "grad" in (text := text_of(part)) and len(text) <= _SHORT]
    return f"the norm of `{texts[0]}` is measured" if texts else "the norm of gradients is measured"


class ScaledLossLogged(TraceRule):
    """The scaled loss is logged instead of the loss."""

    code = "HS111"
    name = "scaled-loss-logged"
    severity = "warning"
    reason = (
        "`scaler.scale(loss)` returns the loss times the scale, initially 65536. Assigned to the name of the loss, the scaled value "
        "is also what gets logged, averaged and compared with the best loss."
    )
    bad = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\ntotal = 0\nfor x in loader:\n    loss = model(x)\n"
        "    loss = scaler.scale(loss)\n    loss.backward()\n    scaler.step(optimizer)\n    scaler.update()\n    total += loss.item()\n",
        "import torch\nscaler = torch.amp.GradScaler('cuda')\ntotal = 0\nfor x in loader:\n    loss = model(x)\n    if amp:\n"
        "        loss = scaler.scale(loss)\n        loss.backward()\n        scaler.step(optimizer)\n        scaler.update()\n"
        "    else:\n        loss.backward()\n        optimizer.step()\n    total += loss.item()\n",
    )
    good = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\ntotal = 0\nfor x in loader:\n    loss = model(x)\n"
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n    total += loss.item()\n",
    )
    references = ("https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler.scale",)
    kinds = ("item",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The value of a variable that contains the scaled loss."""
        event = trace[index]
        if factor := _own_factor(script, event):
            return self.finding(
                script.where(event.node),
                f"`{event.local.subject}` is the scaled loss here: its value is multiplied by `{factor}`",
                instead="assign the scaled loss to a separate name",
            )
        if event.scaled != "yes" or without_amp(event):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.local.subject}` is the scaled loss here: its value is multiplied by the scale, which starts at 65536",
            instead="assign the scaled loss to a separate name, or call scaler.scale(loss).backward() directly",
        )


def _own_factor(script: Script, event: Event) -> str:
    """The scale of `loss = loss * scale` before an event, if the script divides gradients by it; "" if there is none."""
    loop = next((n for n in script.above(event.node) if isinstance(n, (ast.For, ast.While))), None)
    line, name = getattr(event.node, "lineno", 0), event.local.subject
    nodes = list(ast.walk(loop)) if loop is not None and name else []
    assigned = [n for n in nodes if isinstance(n, ast.Assign) and text_of(n.targets[0]) == name and n.lineno < line]
    value = max(assigned, key=lambda n: n.lineno).value if assigned else None
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Mult) or key_of(value.left) != name:
        return ""
    factor = key_of(value.right)
    if not _SCALE_NAME.search(factor):
        return ""
    divided = re.search(rf"\.grad\b.*(/=?|\.div_\() *{re.escape(factor)}\b", script.source.text)
    return factor if divided else ""


RULES: tuple[type[Rule], ...] = (ScaledGradientsRead, ScaledLossLogged)
