"""HS113: clipping that mixed precision leaves out."""

from __future__ import annotations

import ast
import re

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.gradients import measures_only
from halfstep.check.script.flow.order import TraceRule, earlier, scalers_at, switched_off, without_amp
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


RULES: tuple[type[Rule], ...] = (ClipOnlyWithoutAmp,)
