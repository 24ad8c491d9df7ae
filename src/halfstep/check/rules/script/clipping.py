"""HS113, HS604, HS189: clipping in one precision only, or on every micro-batch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding, Severity
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event, Guard, compatible
from halfstep.check.script.flow.gradients import measures_only
from halfstep.check.script.flow.order import (
    STEPS,
    TraceRule,
    earlier,
    is_amp,
    later,
    only_settings,
    scalers_at,
    switched_off,
    without_amp,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import ACCUMULATION, accumulated_over, contexts_before, length_of
from halfstep.check.script.objects.engines import ACCELERATE, engine_at, loop_class
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.objects.weights import conditions_of
from halfstep.check.script.scaling.trainer_clips import micro_batches_of, trainer_clips
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_CLIPS = regex(r"clip", re.IGNORECASE)
_LIBRARIES = {"numpy", "torch", "torchvision", "transformers", "open_clip", "moviepy"}
_DEVICE = regex(r"cuda|gpu|device", re.IGNORECASE)
_WINDOW_END = regex(r"sync|accum|step|batch|%", re.IGNORECASE)
_OWN = regex(r"clip_?grad(ient)?s?(_|$)|grad(ient)?s?_clip", re.IGNORECASE)
_BRANCHES = """\
import torch
scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
        loss = loss_fn(model(x), y)
    if use_amp:
        scaler.scale(loss).backward()
{amp}        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
{full}        optimizer.step()
"""
_CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
_CURE = f"        scaler.unscale_(optimizer)\n{_CLIP}"


class ClipOnlyWithoutAmp(TraceRule):
    """Gradients are clipped only in the branch without mixed precision."""

    code = "HS113"
    name = "clip-only-without-amp"
    severity = "warning"
    reason = (
        "The limit on the gradient norm is part of the optimizer's settings, and only the float32 branch applies it: with mixed "
        "precision the same command trains with another effective step, and a spike that would have been clipped changes the "
        "weights. The setting is ignored without a message."
    )
    bad = (_BRANCHES.format(amp="", full=_CLIP),)
    good = (_BRANCHES.format(amp=_CURE, full=_CLIP),)
    references = ("https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping",)
    kinds = ("scaler_step",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A scaler's step without a clip, next to a branch for float32 that clips."""
        step = trace[index]
        if switched_off(script, step):
            return None
        clips = [e for e in trace if e.kind == "clip" and not measures_only(e.node) and e.loops[:1] == step.loops[:1]]
        clips += _own_clips(script, clips, step)
        skipped = [e for e in clips if _is_without_scaler(trace, e, step) or _is_switched_off(script, e, step)]
        if not skipped or len(skipped) != len(clips) or _clips_otherwise(script, clips):
            return None
        clip = skipped[0]
        line = script.where(clip.node).line
        # Gradients that are unscaled for a clip which never comes: the place where it is missing.
        before = next(
            (i for i in earlier(trace, index, "unscale", "backward") if trace[i].scaler == step.scaler), index
        )
        unscaled = (
            trace[before] if trace[before].kind == "unscale" and trace[before].function is step.function else step
        )
        scaler, optimizer = step.local.scaler, step.local.optimizer or "optimizer"
        if unscaled is not step:
            return self.finding(
                script.where(unscaled.node),
                f"`{scaler}.unscale_` is followed by no clipping: `{clip.subject}` (line {line}) runs only without mixed precision",
                instead=f"call {clip.subject} after {scaler}.unscale_ as well",
            )
        return self.finding(
            script.where(step.node),
            f"`{scaler}.step` uses gradients that are not clipped: `{clip.subject}` (line {line}) runs only without mixed precision",
            instead=f"call {scaler}.unscale_({optimizer}), then {clip.subject}, before this step",
        )


class ClipOnlyWithAmp(TraceRule):
    """Gradients are clipped only in the branch with mixed precision."""

    code = "HS604"
    name = "clip-only-with-amp"
    severity = "warning"
    reason = (
        "The limit on the gradient norm is part of the optimizer's settings, not of mixed precision. Where only the branch with the scaler "
        "applies it, the same command without mixed precision, or on a machine without CUDA, trains with unlimited steps, and a comparison "
        "of the two precisions compares two optimizers."
    )
    bad = (_BRANCHES.format(amp=_CURE, full=""),)
    good = (_BRANCHES.format(amp=_CURE, full=_CLIP), _BRANCHES.format(amp="", full=""))
    references = ("https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping",)
    kinds = ("opt_step",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A plain step without a clip, next to a branch with a scaler that clips."""
        step = trace[index]
        back = next(earlier(trace, index, "backward", "owned_backward"), None)
        if back is None or trace[back].kind != "backward" or trace[back].scaled != "no" or step.inside("owned"):
            return None
        scaled = [
            e for e in trace if e.kind == "scaler_step" and e.optimizer == step.optimizer and e.loops == step.loops
        ]
        scaled = [e for e in scaled if _is_other_branch(e, step) and not switched_off(script, e)]
        clips = [e for e in trace if e.kind == "clip" and not measures_only(e.node) and e.loops[:1] == step.loops[:1]]
        unknown = _own_clips(script, clips, step) or _clips_otherwise(script, clips)
        if not scaled or not clips or unknown or trace[back].function is not step.function:
            return None
        if not all(_is_other_branch(clip, step) and compatible(clip, scaled[0]) for clip in clips):
            return None
        clip = clips[0]
        return self.finding(
            script.where(step.node),
            f"`{step.local.optimizer}.step` uses gradients that are not clipped: `{clip.subject}` ({script.at(clip.node)}) runs only with "
            "mixed precision",
            instead=f"call {clip.subject} before this step as well",
        )


def _is_other_branch(event: Event, step: Event) -> bool:
    """Whether an event is where the scaler is used, in the other branch of a condition around a step."""
    return any(
        Guard(text, not is_true) in step.guards and (is_amp((text, is_true)) or _DEVICE.search(text))
        for text, is_true in event.guards
    )


def _is_without_scaler(trace: Trace, clip: Event, step: Event) -> bool:
    """Whether a clip is in the branch, contrary to that of the step, in which the loss is not scaled."""
    # Without the contrary of a condition on the clip, the branch may be about something else.
    if compatible(clip, step) or not any((text, not is_true) in step.guards for text, is_true in clip.guards):
        return False
    plain = (e for e in trace if e.kind == "backward" and e.scaled == "no" and compatible(e, clip))
    return without_amp(clip) or any(not compatible(e, step) for e in plain)


def _is_switched_off(script: Script, clip: Event, step: Event) -> bool:
    """Whether a clip runs only where the scaler is disabled: `if not amp:` with `GradScaler(enabled=amp)`."""
    flags = {s.enabled for s in scalers_at(script, step)}
    return len(flags) == 1 and any(not is_true and text in flags for text, is_true in clip.guards)


def _own_clips(script: Script, clips: list[Event], step: Event) -> list[Event]:
    """Calls in the step's function that clip by a function of the project: `clip_gradient(optimizer, limit)`."""
    recognised = {e.node for e in clips}
    sites = [site for name, calls in script.outline.calls.items() if _OWN.search(name) for site in calls]
    return [
        Event("clip", call, function, subject=text_of(call.func), guards=conditions_of(script.outline, call))
        for call, function in sites
        if call not in recognised and function is step.function and not script.outline.names.full(call.func)
    ]


def _clips_otherwise(script: Script, clips: list[Event]) -> bool:
    """Whether the script has a call that may clip and is not among the recognised ones, such as a function of its own."""
    recognised = {e.node for e in clips}
    sites = [site for name, calls in script.outline.calls.items() if _CLIPS.search(name) for site in calls]
    return any(
        site.call not in recognised and isinstance(site.call, ast.Call) and not _clips_values(script, site.call)
        for site in sites
    )


def _clips_values(script: Script, call: ast.Call) -> bool:
    """Whether a call is about something else than gradients: a class of video clips, `np.clip`, `image.clip(0, 1)`."""
    full = script.outline.names.full(call.func)
    if full.split(".")[0] in _LIBRARIES or key_of(call.func) in script.outline.classes:
        return "grad" not in full.lower()
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr in {"clip", "clip_"}
    values = [*call.args, *(k.value for k in call.keywords)]
    return is_method and bool(values) and all(isinstance(v, (ast.Constant, ast.UnaryOp)) for v in values)


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
_TRAINER = """\
import torch
from transformers import Trainer, TrainingArguments

class Clipping(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        {clip}
        return loss.detach()

args = TrainingArguments("out", bf16=True, gradient_accumulation_steps=4{options})
Clipping(model=model, args=args, train_dataset=data).train()
"""
_PLAIN_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
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
        _PLAIN.format(outside=f"    {_PLAIN_CLIP}\n", inside=""),
        _ACCUMULATE.format(clip=f"        {_OWN_CLIP}"),
        _WINDOW.format(outside=f"    {_OWN_CLIP}\n", inside=""),
        _TRAINER.format(clip=_PLAIN_CLIP, options=""),
    )
    good = (
        _PLAIN.format(outside="", inside=f"        {_PLAIN_CLIP}\n"),
        _ACCUMULATE.format(clip=f"        if accelerator.sync_gradients:\n            {_OWN_CLIP}"),
        _WINDOW.format(outside="", inside=f"        {_OWN_CLIP}\n"),
        _TRAINER.format(clip="self.num_batches += 1", options=", max_grad_norm=1.0"),
    )
    references = ("https://github.com/huggingface/accelerate/issues/641", _DOCS)
    words = ("Accelerator",)
    kinds = ("clip", "owned_clip")

    def check(self, script: Script) -> Iterator[Finding]:
        """Every clip of the traces, and those of Trainers."""
        yield from super().check(script)
        yield from self._in_trainer(script)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A clip inside accumulate() that is not limited to the end of the window."""
        event = trace[index]
        func = event.node.func if isinstance(event.node, ast.Call) else None
        if func is None or measures_only(event.node):
            return None
        owner = loop_class(script, event.function.cls) if event.function.cls else None
        if owner is not None and owner.base == "trainer":
            return None  # `_in_trainer`, without traces
        # torch's own function is wrong there too: the Accelerator is then the one of the context.
        regions = [r.node.func for r in event.regions if isinstance(r.node, ast.Call)]
        contexts = [f.value for f in regions if isinstance(f, ast.Attribute) and f.attr == "accumulate"]
        contexts += contexts_before(script, trace, index)
        owners = [func.value] if isinstance(func, ast.Attribute) and event.kind == "owned_clip" else contexts
        engine = engine_at(script, key_of(owners[0]), event.function) if owners else None
        if engine is None or engine.library != ACCELERATE:
            return self._in_window(script, trace, index)
        if engine.plugin == "deepspeed":
            return None
        if event.accumulating or any("sync" in text for text, _ in event.guards):
            return None
        if contexts:
            steps = constant(engine.steps) if engine.steps is not None else None
            if engine.is_created and steps in {None, 1}:
                return None  # without accumulation every micro-batch is the last one
            number = text_of(engine.steps) or "gradient_accumulation_steps"  # of a file that creates the Accelerator
            condition = "" if isinstance(steps, int) else f"if `{number}` is above 1, "
            window = f"`{engine.key}.accumulate`"
        else:
            step = next(later(trace, index, "opt_step"), None)
            if step is None or not trace[step].accumulating or trace[step].loops != event.loops:
                return None
            if not event.loops and not _is_micro_batch(script, trace, index, trace[step]):
                return None
            condition = ""
            window = f"the window at whose end `{trace[step].optimizer}` steps"
        effect = "raises in fp16 and clips incomplete sums otherwise"
        severity: Severity = "warning"
        if event.kind == "clip":
            effect, severity = "clips incomplete sums", "advice" if condition else "warning"
        elif engine.precision == "fp16":
            effect, severity = "raises RuntimeError on the second one", "warning" if condition else "error"
        elif engine.precision in {"bf16", "fp32", "not fp16"}:
            effect, severity = "clips incomplete sums", "advice" if condition else "warning"
        return self.finding(
            script.where(event.node),
            f"{condition}this clips on every micro-batch of {window}, which {effect}",
            instead=f"clip only where the optimizer steps, or under `if {engine.key}.sync_gradients`",
            severity=severity,
        )

    def _in_trainer(self, script: Script) -> Iterator[Finding]:
        """The clips in `training_step` of a transformers Trainer, which runs once per micro-batch."""
        number, setting = micro_batches_of(script) if "training_step" in script.source.text else (1, "")
        for call in dict.fromkeys(trainer_clips(script)) if number != 1 else ():
            condition = "" if number else f"if `{setting}` is above 1, "
            times = f", {number} times per step" if number else ""
            yield self.finding(
                script.where(call),
                f"{condition}`training_step` runs once per micro-batch{times}, so incomplete sums of the gradients are clipped",
                instead="set max_grad_norm of the TrainingArguments: the Trainer clips once per step, after it has unscaled",
                severity="advice" if condition else None,
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
        always = {*event.guards, *trace[back].guards}
        unscales = [e for e in trace if e.kind == "unscale" and e.loops == event.loops and always.issuperset(e.guards)]
        if any(only_settings(script, e, trace[back]) for e in unscales):
            return None  # HS106 reports the unscale_ that comes with it
        # A function that only clips is right; the mistake is where the loop calls it.
        depth = min(len(trace[back].roots), len(event.roots))
        place = (*event.roots, event.node)[depth] if event.function is not trace[back].function else event.node
        name = text_of(place.func) if isinstance(place, ast.Call) and place is not event.node else event.subject
        return self.finding(
            script.where(place),
            f"`{name or text_of(event.node)}` runs on every micro-batch, but the step of line {window.line(script)} runs "
            f"only when {window.ends}: incomplete sums are clipped",
            instead="clip once per window, right before the step",
        )


def _is_micro_batch(script: Script, trace: Trace, index: int, step: Event) -> bool:
    """Whether a function without a loop runs once per micro-batch: it has the backward, the clip, and a step that counts."""
    event = trace[index]
    back = next(earlier(trace, index, "backward", "owned_backward", *STEPS), None)
    is_here = back is not None and "backward" in trace[back].kind and trace[back].function is event.function
    is_open = is_here and back is not None and trace[back].guards == event.guards
    return is_open and step.function is event.function and any(length_of(script, g) for g in step.accumulating)


RULES: tuple[type[Rule], ...] = (ClipOnlyWithoutAmp, ClipOnlyWithAmp, ClipEveryMicroBatch)
