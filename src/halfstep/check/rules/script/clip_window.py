"""HS189: clipping that belongs once per accumulation window."""

from __future__ import annotations

import ast

from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import compatible
from halfstep.check.script.flow.gradients import measures_only
from halfstep.check.script.flow.order import STEPS, TraceRule, earlier, later, only_settings
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import ACCUMULATION, accumulated_over
from halfstep.check.script.objects.engines import ACCELERATE, engine_at
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_ACCUMULATE = """\
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = loss_fn(model(x), y)
        accelerator.backward(loss)
{clip}
        optimizer.step()
        optimizer.zero_grad()
"""
_WINDOW = """\
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for i, (x, y) in enumerate(loader):
    accelerator.backward(loss_fn(model(x), y) / 4)
{outside}    if (i + 1) % 4 == 0:
{inside}        optimizer.step()
        optimizer.zero_grad()
"""
_PLAIN = """\
import torch

for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y) / accumulation_steps
    loss.backward()
{outside}    if (i + 1) % accumulation_steps == 0:
{inside}        optimizer.step()
        optimizer.zero_grad()
"""
_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
_OWN_CLIP = "accelerator.clip_grad_norm_(model.parameters(), 1.0)"
_DOCS = "https://huggingface.co/docs/accelerate/package_reference/accelerator#accelerate.Accelerator.clip_grad_norm_"


class ClipEveryMicroBatch(TraceRule):
    """Gradients are clipped on every micro-batch of an accumulation window."""

    code = "HS189"
    name = "clip-every-micro-batch"
    severity = "warning"
    reason = (
        "Between two steps the gradients are sums of a part of the micro-batches. Clipping each of these sums shrinks what came before "
        "and leaves the last micro-batch more weight, and the norm that is clipped is not the one of the step. Clip once, right before "
        "the step. With Accelerate every micro-batch of a window runs the body of `accelerator.accumulate`; only the optimizer's step waits for the last one. "
        "`accelerator.clip_grad_norm_` unscales first, so in fp16 its second call raises 'unscale_() has already been called on this "
        "optimizer since the last update()'. Guard it with `if accelerator.sync_gradients`."
    )
    bad = (
        _PLAIN.format(outside=f"    {_CLIP}\n", inside=""),
        _ACCUMULATE.format(clip=f"        {_OWN_CLIP}"),
        _WINDOW.format(outside=f"    {_OWN_CLIP}\n", inside=""),
    )
    good = (
        _PLAIN.format(outside="", inside=f"        {_CLIP}\n"),
        _ACCUMULATE.format(clip=f"        if accelerator.sync_gradients:\n            {_OWN_CLIP}"),
        _WINDOW.format(outside="", inside=f"        {_OWN_CLIP}\n"),
    )
    references = ("https://github.com/huggingface/accelerate/issues/641", _DOCS)
    words = ("Accelerator",)
    kinds = ("clip", "owned_clip")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A clip inside accumulate() that is not limited to the end of the window."""
        event = trace[index]
        func = event.node.func if isinstance(event.node, ast.Call) else None
        if func is None or measures_only(event.node):
            return None
        if not isinstance(func, ast.Attribute):
            return self._in_window(script, trace, index)
        engine = engine_at(script, key_of(func.value), event.function) if event.kind == "owned_clip" else None
        if engine is None or engine.library != ACCELERATE:
            return self._in_window(script, trace, index)
        if engine.plugin == "deepspeed":
            return None
        if event.accumulating or any("sync" in text for text, _ in event.guards):
            return None
        if any(".accumulate(" in text_of(region.node) for region in event.regions):
            steps = constant(engine.steps) if engine.steps is not None else None
            if steps in {None, 1}:
                return None  # without accumulation every micro-batch is the last one
            condition = "" if isinstance(steps, int) else f"if `{text_of(engine.steps)}` is above 1, "
            window = f"`{engine.key}.accumulate`"
        else:
            step = next(later(trace, index, "opt_step"), None)
            if step is None or not trace[step].accumulating or trace[step].loops != event.loops or not event.loops:
                return None
            condition = ""
            window = f"the window at whose end `{trace[step].optimizer}` steps"
        effect = "raises in fp16 and clips incomplete sums otherwise"
        severity: Severity = "warning"
        if engine.precision == "fp16":
            effect, severity = "raises RuntimeError on the second one", "warning" if condition else "error"
        elif engine.precision in {"bf16", "fp32"}:
            effect, severity = "clips incomplete sums", "advice" if condition else "warning"
        return self.finding(
            script.where(event.node),
            f"{condition}this clips on every micro-batch of {window}, which {effect}",
            instead=f"call `{engine.key}.{func.attr}` only where the optimizer steps, or under `{engine.key}.sync_gradients`",
            severity=severity,
        )

    def _in_window(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a clip that runs as often as the backward, while the step waits for the end of a window."""
        event = trace[index]
        back = next(earlier(trace, index, "backward", "owned_backward", *STEPS), None)
        if back is None or "backward" not in trace[back].kind or trace[back].loops != event.loops:
            return None
        window = accumulated_over(script, trace, back)
        # A test of the window under another name is not a setting.
        if (
            window is None
            or window.guard in event.guards
            or not only_settings(script, event, trace[back])
            or not compatible(event, window.step)
        ):
            return None
        if "%" not in window.ends and not ACCUMULATION.search(f"{window.length} {window.ends}"):
            return None
        if any(e.loops == event.loops and only_settings(script, e, trace[back]) for e in trace if e.kind == "unscale"):
            return None  # HS106 reports the unscale_ that comes with it
        return self.finding(
            script.where(event.node),
            f"`{event.subject or text_of(event.node)}` runs on every micro-batch, but the step of line {window.line(script)} runs "
            f"only when {window.ends}: incomplete sums are clipped",
            instead="clip once per window, right before the step",
        )


RULES: tuple[type[Rule], ...] = (ClipEveryMicroBatch,)
