"""HS118: clipping that comes before the gradients."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.gradients import measures_only
from halfstep.check.script.flow.order import STEPS, TraceRule, later, repeats
from halfstep.check.script.flow.recognise import CLIPS
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.engines import engine_at, loop_class
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_OWN = regex(r"^_?clip_?(grad(ient)?s?|grad(ient)?_norms?)_?$", re.IGNORECASE)  # functions of a project
_BACKWARDS = {"backward", "manual_backward", "grad", "training_step", "optimizer_closure", "closure"}
_EARLY_HOOKS = {"training_step", "on_train_batch_start", "on_before_backward", "on_before_zero_grad"}
_LIGHTNING = "before Lightning's backward"
_CLOSURE = "before the step, whose closure runs Lightning's backward"
_TRAINER = "before the Trainer's backward"
_MODULE = """\
import torch
from pytorch_lightning import LightningModule, Trainer

class Module(LightningModule):
    def training_step(self, batch, index):
        loss = self.loss(batch)
{step}        return loss
{hook}
Trainer(precision="bf16-mixed").fit(Module(), loader)
"""
_MODULE_LIMIT = "        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)\n"
_NESTED = """\
import torch

for batch in loader:
{early}    for x, y in batch.split(4):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_fn(model(x), y) / 4
        loss.backward()
{late}    optimizer.step()
    optimizer.zero_grad()
"""
_OWNED_LIMIT = "        if self.accelerator.sync_gradients:\n            self.accelerator.clip_grad_norm_(self.net.parameters(), 1.0)\n"
_OWNED = """\
from accelerate import Accelerator

class Loop(Base):
  def fit(self, loader):
    for x, y in loader:
      with self.accelerator.accumulate(self.net):
        loss = self.loss(x, y)
{early}        self.accelerator.backward(loss)
{late}        self.optimizer.step()
        self.optimizer.zero_grad()
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


class ClipBeforeBackward(TraceRule):
    """Gradients are clipped before backward has computed them."""

    code = "HS118"
    name = "clip-before-backward"
    severity = "error"
    reason = (
        "Between `zero_grad()` and `backward()` there are no gradients: the clip finds None or zeros (or, in an accumulation window, "
        "only those of earlier micro-batches) and the step uses gradients that are not limited. The setting is ignored without a message, and a spike that should have been clipped "
        "changes the weights."
    )
    bad = (
        _EARLY.format(early=_LIMIT, late=""),
        _EARLY.format(early=_LIMIT, late="").replace("    optimizer.zero_grad()\n", "") + "    optimizer.zero_grad()\n",
        _NESTED.format(early=_LIMIT, late=""),
        _OWNED.format(early=_OWNED_LIMIT, late=""),
        _EARLY.format(early=_LIMIT, late="") + "    scaler.step(second)\n    second.zero_grad()\n",
        _MODULE.format(step=_MODULE_LIMIT, hook=""),
    )
    good = (
        _EARLY.format(early="", late="    scaler.unscale_(optimizer)\n" + _LIMIT),
        _EARLY.format(early="", late="    scaler.unscale_(optimizer)\n" + _LIMIT).replace(
            "    optimizer.zero_grad()\n", ""
        )
        + "    optimizer.zero_grad()\n",
        _NESTED.format(early="", late=_LIMIT),
        _OWNED.format(early="", late=_OWNED_LIMIT),
        _MODULE.format(
            step="",
            hook="\n    def configure_gradient_clipping(self, optimizer, *limits):\n" + _MODULE_LIMIT,
        ),
    )
    references = (
        "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping",
        "https://github.com/simchowitzlabpublic/nano-world-model/pull/22",
    )
    kinds = ("clip", "owned_clip")
    lines = ("training_step", "optimizer_step", "compute_loss")

    def check(self, script: Script) -> Iterator[Finding]:
        """Every event of the traces, and the methods that Lightning and transformers run before their own backward."""
        yield from super().check(script)
        names = [name for name in script.outline.calls if name in CLIPS or _OWN.search(name)]
        for call, function in (site for name in names for site in script.outline.calls[name]):
            place = _before_owned_backward(script, call, function) if not _measures(call) else ""
            if place:
                yield self.finding(
                    script.where(call),
                    f"`{text_of(call.func)}` runs {place}: the gradients of this step do not exist yet and are not clipped",
                    instead="gradient_clip_val of the Trainer, or clip in `configure_gradient_clipping`"
                    if place != _TRAINER
                    else "max_grad_norm of TrainingArguments",
                )

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A clip between the clearing of all gradients and the backward of the same iteration."""
        clip = trace[index]
        around = [e for e in trace if e.loops[: len(clip.loops)] == clip.loops and compatible(e, clip)]
        # A clip whose conditions exclude each other never runs.
        if clip not in around or not repeats(clip) or measures_only(clip.node) or not _steps_together(around):
            return None
        if any(e.kind in {"owned_step", "handed", "autograd_grad"} or _is_unknown(script, e) for e in around):
            return None
        owned = clip.kind == "owned_clip"
        if owned and not any(e.kind == "owned_backward" for e in around):
            return None
        # The backward may be in a loop over the micro-batches of one step.
        backs = ("backward", "owned_backward")
        back = next((i for i in later(trace, index, *backs) if trace[i].loops[: len(clip.loops)] == clip.loops), None)
        if back is None or not any(trace[i].kind in STEPS for i in later(trace, back, *STEPS)):
            return None
        # Before the clip, in this iteration or at the end of the last one.
        kinds = {*backs, "zero_grad", *STEPS}
        place = around.index(clip)
        before = [e for e in (*around[place:], *around[:place]) if e.kind in kinds]
        cleared = before[-1] if before else clip
        if cleared.kind != "zero_grad" or cleared.loops != clip.loops or cleared.accumulating:
            return None
        if not set(cleared.guards) <= set(clip.guards):
            return None
        line = script.where(trace[back].node).line
        return self.finding(
            script.where(clip.node),
            f"`{clip.subject}` runs after zero_grad() (line {script.where(cleared.node).line}) and before backward (line {line}): "
            + ("the gradients of that backward are not clipped" if owned else "there are no gradients to clip"),
            instead="clip after backward (and unscale_), before the step",
        )


def _steps_together(around: list[Event]) -> bool:
    """Whether an iteration steps one optimizer, or several without a backward between them."""
    order = [e for e in around if e.kind in {"backward", "owned_backward", *STEPS}]
    places = [i for i, e in enumerate(order) if e.kind in STEPS]
    one = len({e.optimizer for e in order if e.kind in STEPS}) == 1
    return bool(places) and (one or len(places) == places[-1] - places[0] + 1)


def _is_unknown(script: Script, event: Event) -> bool:
    """Whether a backward is that of an object which may also clip or step: not of an Accelerator or a Fabric."""
    return event.kind == "owned_backward" and engine_at(script, event.subject, event.function) is None


def _measures(call: ast.Call) -> bool:
    """Whether a call only returns the norm: its limit is infinite, or an option switches the clipping off."""
    return measures_only(call) or any("clip" in (k.arg or "") and constant(k.value) is False for k in call.keywords)


def _before_owned_backward(script: Script, call: ast.Call, function: Function) -> str:
    """Where a call runs, if that is before the backward of a library that owns the training loop; else ""."""
    owner = loop_class(script, function.cls) if function.cls else None
    if owner is None or (isinstance(call.func, ast.Attribute) and text_of(call.func.value) == "self"):
        return ""
    before = [c for c in ast.walk(function.node) if isinstance(c, ast.Call) and c.lineno < call.lineno]
    if any(text_of(c.func).rsplit(".", 1)[-1] in _BACKWARDS for c in before):
        return ""
    if owner.base == "trainer":
        return _TRAINER if function.name == "compute_loss" else ""
    if owner.base != "automatic":
        return ""
    if function.name == "optimizer_step":
        return _CLOSURE if any(map(_runs_closure, _calls_after(function, call))) else ""
    return _LIGHTNING if function.name in _EARLY_HOOKS or _is_part_of_step(script, function) else ""


def _calls_after(function: Function, call: ast.Call) -> list[ast.Call]:
    return [c for c in ast.walk(function.node) if isinstance(c, ast.Call) and c.lineno > call.lineno]


def _runs_closure(call: ast.Call) -> bool:
    """Whether a call steps with the closure that computes the gradients: passed by name, or in the hook of the base class."""
    func = text_of(call.func)
    passed = [text_of(value) for value in (*call.args, *(k.value for k in call.keywords))]
    return func == "super().optimizer_step" or (func.endswith(".step") and any("closure" in text for text in passed))


def _is_part_of_step(script: Script, function: Function) -> bool:
    """Whether only `training_step` of the class calls a method."""
    callers = {caller for c, caller in script.outline.calls.get(function.name, ()) if caller.cls == function.cls}
    return bool(callers) and all(caller.name == "training_step" for caller in callers)


RULES: tuple[type[Rule], ...] = (ClipBeforeBackward,)
