"""HS101-HS111: the order of scale, backward, unscale, clip, step and update."""

from __future__ import annotations

import ast

from halfstep.check.finding import Finding
from halfstep.check.fixes.loops import scale_fix, unscale_fix, update_fix
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.gradients import (
    checked_by_hand,
    is_other_choice,
    is_trial,
    joins_unscaled,
    may_lack_scaler,
    measures_only,
    scaled_alternatives,
    scaled_elsewhere,
    skipped_unscale,
    unscaled_between,
)
from halfstep.check.script.flow.order import (
    STEPS,
    TraceRule,
    between,
    earlier,
    exclusive,
    implied,
    later,
    only_settings,
    repeats,
    scaled_before,
    scales_between,
    switched_off,
    without_amp,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.updates import owns_loop, seldom_updated, shows_all_uses
from halfstep.check.script.objects.values import argument, text_of
from halfstep.check.script.scaling.listed import clipped_scaled
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_START = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
"""
_RIGHT = (
    _START
    + """\
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
)
_PLAIN = _START + "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
_ACCUMULATING = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y) / 4
    scaler.scale(loss).backward()
    if (i + 1) % 4 == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


def _created_here(script: Script, key: str) -> bool:
    return bool(script.scalers_named(key))


class MissingUpdate(TraceRule):
    """scaler.step is never followed by scaler.update."""

    code = "HS101"
    name = "missing-update"
    severity = "error"
    reason = (
        "`scaler.step` records that the optimizer has stepped, and only `scaler.update()` resets that record, so the second "
        "`step` raises RuntimeError. Without `update()` the scale also never adapts: it stays at 65536, a model that "
        "overflows skips every step, and underflow is never corrected."
    )
    bad = (
        _START + "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n",
        "from torch.cuda.amp import GradScaler\nclass Trainer:\n    def __init__(self):\n        self.scaler = GradScaler()\n"
        "    def train(self):\n        for x in self.loader:\n            loss = self.model(x)\n"
        "            self.scaler.scale(loss).backward()\n            self.scaler.step(self.optimizer)\n",
    )
    good = (_PLAIN, _RIGHT, _ACCUMULATING)
    references = (_DOCS, "https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler")
    kinds = ("scaler_step",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A step without an update anywhere in its trace."""
        event = trace[index]
        if seldom := seldom_updated(script, trace, index):
            return self.finding(
                script.where(event.node),
                f"`{event.local.scaler}.step` repeats {seldom}: the second step raises RuntimeError",
                instead=f"call {event.local.scaler}.update() once, after the last step of the iteration",
            )
        updated = {e.scaler for e in trace if e.kind == "update"}
        passed = {e.scaler for e in trace if e.kind == "handed"}  # to functions elsewhere, which may update it
        if event.scaler in updated | passed or switched_off(script, event):
            return None
        if updated and not all(_created_here(script, key) for key in (event.scaler, *updated)):
            return None  # the same scaler under another name, perhaps
        is_open = not shows_all_uses(script, trace, event)
        if is_open and not owns_loop(script, trace, event):
            return None  # the caller may update
        unless = f", unless the caller of `{event.function.name}` updates it" if is_open else ""
        return self.finding(
            script.where(event.node),
            f"`{event.scaler}.step` is never followed by `{event.scaler}.update()`{unless}: the second step raises "
            "RuntimeError, and the scale never adapts",
            instead=f"call {event.scaler}.update() once, after the last step of the iteration",
            fix=None if is_open else update_fix(script, trace, index),
            severity="warning" if is_open else None,
        )


class UnscaledBackward(TraceRule):
    """The loss is not scaled before backward, but the scaler steps the optimizer."""

    code = "HS102"
    name = "unscaled-backward"
    severity = "error"
    reason = (
        "`scaler.step` divides every gradient by the scale. Gradients of an unscaled loss become 65536 times too small at the "
        "initial scale, so the model does not learn and small float16 gradients underflow. If `scale()` is never called, "
        "`step` raises AssertionError because the scale is not initialized."
    )
    bad = (
        _START + "    loss.backward()\n    scaler.step(optimizer)\n    scaler.update()\n",
        _START + "    scaler.scale(loss)\n    loss.backward()\n    scaler.step(optimizer)\n    scaler.update()\n",
    )
    good = (
        _PLAIN,
        _RIGHT,
        "import torch\nscaler = torch.amp.GradScaler('cuda', enabled=use_amp)\nfor x in loader:\n    loss = model(x)\n"
        "    if use_amp:\n        scaler.scale(loss).backward()\n    else:\n        loss.backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()\n",
    )
    references = (_DOCS, "https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling")
    kinds = ("backward",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A backward of an unscaled loss whose next step is scaler.step."""
        event = trace[index]
        if event.scaled != "no" or without_amp(event) or event.inside("no_grad"):
            return None
        following = next(later(trace, index, *STEPS, "owned_backward"), None)
        if following is None or trace[following].kind != "scaler_step" or is_trial(trace, index, following):
            return None
        if between(trace, index, following, "zero_grad"):
            return None
        step = trace[following]
        if event.loops != step.loops[: len(event.loops)] and step.loops != event.loops[: len(step.loops)]:
            return None
        if switched_off(script, step) or scales_between(trace, index, following) or may_lack_scaler(script, step):
            return None
        scales = [trace[i] for i in earlier(trace, index, "scale")]
        if any(e.function is not event.function and not _is_used_up(script, e) for e in scales):
            return None  # scaled by a function that returns the loss
        calling = {e.function for e in script.events("backward")}
        if any(e.function not in calling for e in script.events("scale")):
            return None  # scaled by an object that returns the loss
        others = scaled_alternatives(trace, index, following)
        if not all(implied(e, event) for e in others) or (others and exclusive(trace, event, "scaler_step")):
            return None  # scaled in another branch
        if joins_unscaled(trace, index, following):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.subject or 'the loss'}` is not scaled, but `{step.scaler}.step` divides its gradients by the scale",
            instead=f"{step.scaler}.scale({event.subject or 'loss'}).backward()",
            fix=scale_fix(script, event, step),
        )


def _is_used_up(script: Script, scale: Event) -> bool:
    """Whether a scaled loss is only there for its backward: `scaler.scale(loss).backward()`."""
    parent = script.outline.parents.get(scale.node)
    return isinstance(parent, ast.Attribute) and parent.attr == "backward"


class StepBypassesScaler(TraceRule):
    """optimizer.step is called on gradients that are still multiplied by the loss scale."""

    code = "HS103"
    name = "step-bypasses-scaler"
    severity = "error"
    reason = (
        "After `scaler.scale(loss).backward()` gradients are multiplied by the scale, which starts at 65536, and may contain inf. "
        "`optimizer.step()` applies them as they are: an SGD step is too long by that factor, Adam normalizes the scale away but "
        "its eps becomes meaningless, and a single inf turns weights into NaN. `scaler.step(optimizer)` unscales the "
        "gradients and skips the step if any is inf or NaN."
    )
    bad = (
        _START + "    scaler.scale(loss).backward()\n    optimizer.step()\n    scaler.update()\n",
        _START
        + "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    optimizer.step()\n    scaler.update()\n",
    )
    good = (
        _PLAIN,
        _RIGHT,
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    loss = model(x)\n"
        "    if use_amp:\n        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()\n"
        "    else:\n        loss.backward()\n        optimizer.step()\n    optimizer.zero_grad()\n",
    )
    references = (_DOCS,)
    kinds = ("opt_step", "scaler_step")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """optimizer.step after a scaled backward."""
        event, call = trace[index], trace[index].node
        if without_amp(event):
            return None
        if event.kind == "scaler_step":
            return self._wrong_scaler(script, trace, index)
        if isinstance(call, ast.Call) and (call.args or call.keywords) and text_of(call.func).endswith(".step"):
            return self._closure(script, event, call)
        start = scaled_before(trace, index)
        if start is None or switched_off(script, trace[start]) or self._has_scaler(script, event):
            return None
        apart = any(e.kind == "scaler_step" and not (set(e.guards) <= set(event.guards)) for e in trace[start:])
        if apart and exclusive(trace, event, "scaler_step") and not is_other_choice(script, trace, start, index):
            return None
        mine = [
            e for e in between(trace, start, index, "scaler_step", "unscale") if e.optimizer in {event.optimizer, ""}
        ]
        if any(e.kind == "unscale" and checked_by_hand(script, e, event) for e in mine):
            return None  # unscaled and checked by hand
        scaler = trace[start].scaler
        if any(e.kind == "scaler_step" and (implied(event, e) or only_settings(script, e, event)) for e in mine):
            message = f"`{event.optimizer}.step()` repeats the step of `{scaler}.step` on the same gradients"
            return self.finding(script.where(call), message, instead=f"remove {event.optimizer}.step()")
        if any(e.kind == "scaler_step" for e in mine):
            return None
        if mine:
            message = f"`{event.optimizer}.step()` bypasses `{scaler}`: a step with inf or NaN gradients is not skipped"
        else:
            message = f"`{event.optimizer}.step()` uses gradients that are still multiplied by the scale of `{scaler}`"
        return self.finding(
            script.where(call), message, instead=f"{scaler}.step({event.optimizer}), then {scaler}.update()"
        )

    def _wrong_scaler(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a loss that one scaler scales and another unscales, although the first steps nothing."""
        event = trace[index]
        before = next((i for i in earlier(trace, index, "backward") if trace[i].scaled == "yes"), None)
        back = trace[before] if before is not None else event
        if back.scaler == event.scaler or back.loops != event.loops or back.function is not event.function:
            return None
        if not _created_here(script, back.scaler) or not _created_here(script, event.scaler):
            return None
        if any(e.scaler == back.scaler for e in trace if e.kind in {"scaler_step", "unscale", "handed"}):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.local.scaler}.step` divides by its own scale, but `{back.local.scaler}` scaled the loss (line "
            f"{getattr(back.node, 'lineno', 0)})",
            instead=f"{back.local.scaler}.step({event.local.optimizer})",
        )

    def _closure(self, script: Script, event: Event, call: ast.Call) -> Finding | None:
        """The finding for `optimizer.step(closure)` with a closure of this file that scales its loss."""
        name = key_of(argument(call, 0, "closure"))
        inside = [e for e in script.events("backward", "unscale") if name and e.function.name == name]
        scaled = [e for e in inside if e.kind == "backward" and e.scaled == "yes" and not switched_off(script, e)]
        if not scaled or len(scaled) != len(inside) or any(without_amp(e) for e in scaled):
            return None
        return self.finding(
            script.where(call),
            f"`{event.local.optimizer}.step({name})` uses the gradients of `{name}`, still multiplied by the scale of "
            f"`{scaled[0].local.scaler}`",
            instead="an optimizer without a closure through the scaler, or bfloat16 without a scaler",
        )

    @staticmethod
    def _has_scaler(script: Script, event: Event) -> bool:
        """Whether the optimizer was constructed with a scaler, as in Megatron, so that its own step unscales."""
        statements = [script.statement(e.node) for e in script.events("handed")]
        assigned = [key_of(t) for s in statements if isinstance(s, ast.Assign) for t in s.targets]
        return event.optimizer.rsplit(".", 1)[-1] in {key.rsplit(".", 1)[-1] for key in assigned}


class ClipBeforeUnscale(TraceRule):
    """Gradients are clipped while still multiplied by the loss scale."""

    code = "HS104"
    name = "clip-before-unscale"
    severity = "error"
    reason = (
        "Scaled gradients are too large by the scale, which starts at 65536, so clipping to a norm of 1 shrinks them by that factor more "
        "than intended: steps become tiny and the loss plateaus without an error. Call `scaler.unscale_(optimizer)` first; "
        "`scaler.step` then does not unscale again."
    )
    bad = (
        _START
        + "    scaler.scale(loss).backward()\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        + "    scaler.step(optimizer)\n    scaler.update()\n",
        "import torch\nfrom torch.cuda.amp import GradScaler\nscaler = GradScaler()\ndef update(loss):\n"
        "    optimizer.zero_grad()\n    scaler.scale(loss).backward()\n    if clip > 0:\n        torch.nn.utils.clip_grad_value_(net.parameters(), clip)\n"
        "    scaler.step(optimizer)\n    scaler.update()\nfor x in loader:\n    update(net(x))\n",
    )
    good = (_RIGHT, _ACCUMULATING)
    references = (
        "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping",
        "https://github.com/pytorch/examples/issues/1196",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/9330",
    )
    kinds = ("clip",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A clip of scaled gradients."""
        event = trace[index]
        if without_amp(event):
            return None
        start = scaled_before(trace, index)
        back = trace[start] if start is not None else scaled_elsewhere(script, trace, index)
        is_unscaled = start is not None and unscaled_between(script, trace, start, index)
        left = clipped_scaled(script, trace, start, index) if start is not None and is_unscaled else None
        is_unscaled = is_unscaled and left is None
        if back is None or switched_off(script, back) or is_unscaled or measures_only(event.node):
            return None  # HS110 reports a norm that is only measured
        if left is not None:
            return self.finding(
                script.where(event.node),
                f"`{event.subject}` also clips the gradients of {left.name}, which no `unscale_` has divided by the scale",
                instead=f"call {left.unscale} before clipping as well",
            )
        unless = skipped_unscale(script, trace, start, index) if start is not None else ""
        scaler = back.scaler
        steps = (trace[i] for i in later(trace, index, "scaler_step") if trace[i].scaler == scaler)
        optimizer = next((step.optimizer for step in steps), "")
        return self.finding(
            script.where(event.node),
            f"`{event.subject}` clips gradients that are still multiplied by the scale of `{scaler}`"
            + (f", unless `{unless}`" if unless else ""),
            instead=f"call {scaler}.unscale_({optimizer or 'optimizer'}) before clipping",
            fix=unscale_fix(script, trace, start, index) if start is not None else None,
            severity="warning" if unless else None,
        )


class ClipAfterStep(TraceRule):
    """Gradients are clipped after the step that used them."""

    code = "HS109"
    name = "clip-after-step"
    severity = "error"
    reason = "The optimizer has already used the gradients, and they are cleared before the next backward, so clipping has no effect."
    bad = (
        _START
        + "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n"
        + "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    scaler.update()\n",
    )
    good = (_RIGHT,)
    references = ("https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping",)
    kinds = ("clip", "owned_clip")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A clip between a step and the next backward."""
        event = trace[index]
        before = next(earlier(trace, index, "backward", "owned_backward", "handed", *STEPS), None)
        if before is None or trace[before].kind not in {"scaler_step", "opt_step"}:
            return None
        step = trace[before]
        if step.loops != event.loops or not only_settings(script, step, event) or not repeats(event):
            return None
        if any(trace[i].loops == event.loops for i in later(trace, index, "backward", "owned_backward", *STEPS)):
            return None
        backs = earlier(trace, before, "owned_backward" if event.kind == "owned_clip" else "backward")
        if not any(trace[i].loops[: len(event.loops)] == event.loops for i in backs):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.subject}` runs after the step that used these gradients, so it has no effect",
            instead="clip after backward (and unscale_), before the step",
        )


RULES: tuple[type[Rule], ...] = (MissingUpdate, UnscaledBackward, StepBypassesScaler, ClipBeforeUnscale, ClipAfterStep)
