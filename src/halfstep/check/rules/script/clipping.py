"""HS113 and HS118: clipping that mixed precision leaves out, or that comes before the gradients."""

from __future__ import annotations

import ast
import re

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.gradients import measures_only
from halfstep.check.script.flow.order import STEPS, TraceRule, earlier, later, scalers_at, switched_off, without_amp
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.objects.weights import conditions_of
from halfstep.check.script.script import Script

__all__ = ["RULES"]

_CLIPS = re.compile(r"clip", re.IGNORECASE)
_OWN = re.compile(r"clip_?grad(ient)?s?(_|$)|grad(ient)?s?_clip", re.IGNORECASE)
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
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""
_LIMIT = "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
_EARLY = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
{early}    scaler.scale(loss).backward()
{late}    scaler.step(optimizer)
    scaler.update()
"""
_CURE = "        scaler.unscale_(optimizer)\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"


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
    bad = (_BRANCHES.format(amp=""),)
    good = (_BRANCHES.format(amp=_CURE),)
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
    return any(site.call not in recognised and isinstance(site.call, ast.Call) for site in sites)


class ClipBeforeBackward(TraceRule):
    """Gradients are clipped before backward has computed them."""

    code = "HS118"
    name = "clip-before-backward"
    severity = "error"
    reason = (
        "Between `zero_grad()` and `backward()` there are no gradients: the clip finds None or zeros and does nothing, and the step "
        "uses gradients that are not limited. The setting is ignored without a message, and a spike that should have been clipped "
        "changes the weights."
    )
    bad = (
        _EARLY.format(early=_LIMIT, late=""),
        _EARLY.format(early=_LIMIT, late="").replace("    optimizer.zero_grad()\n", "") + "    optimizer.zero_grad()\n",
    )
    good = (
        _EARLY.format(early="", late="    scaler.unscale_(optimizer)\n" + _LIMIT),
        _EARLY.format(early="", late="    scaler.unscale_(optimizer)\n" + _LIMIT).replace(
            "    optimizer.zero_grad()\n", ""
        )
        + "    optimizer.zero_grad()\n",
    )
    references = ("https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping",)
    kinds = ("clip",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A clip between the clearing of all gradients and the backward of the same iteration."""
        clip = trace[index]
        around = [e for e in trace if e.loops[: len(clip.loops)] == clip.loops and compatible(e, clip)]
        steps = {e.optimizer for e in around if e.kind in STEPS}
        # A clip whose conditions exclude each other never runs.
        if clip not in around or not clip.loops or len(steps) != 1 or measures_only(clip.node):
            return None
        if any(e.kind in {"owned_backward", "owned_step", "handed", "autograd_grad"} for e in around):
            return None
        back = next((i for i in later(trace, index, "backward") if trace[i].loops == clip.loops), None)
        if back is None or not any(trace[i].kind in STEPS for i in later(trace, back, *STEPS)):
            return None
        # Before the clip, in this iteration or at the end of the last one.
        kinds = {"backward", "zero_grad", *STEPS}
        place = around.index(clip)
        before = [e for e in (*around[place:], *around[:place]) if e.kind in kinds and e.loops == clip.loops]
        cleared = before[-1] if before else clip
        if cleared.kind != "zero_grad" or not set(cleared.guards) <= set(clip.guards) or cleared.accumulating:
            return None
        return self.finding(
            script.where(clip.node),
            f"`{clip.subject}` runs after zero_grad() (line {script.where(cleared.node).line}) and before backward (line "
            f"{script.where(trace[back].node).line}): there are no gradients to clip",
            instead="clip after backward (and unscale_), before the step",
        )


RULES: tuple[type[Rule], ...] = (ClipOnlyWithoutAmp, ClipBeforeBackward)
