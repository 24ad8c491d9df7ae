"""HS114: a step or an update that is written twice."""

from __future__ import annotations

import ast

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import (
    TraceRule,
    earlier,
    implied,
    only_settings,
    rebound_between,
    repeats,
    switched_off,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.updates import is_passed_in
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.handlers import caught_block
from halfstep.check.script.syntax.names import is_one

__all__ = ["RULES"]

_LOOP = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
{again}    scaler.update()
"""
_TWO_LOSSES = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    for loss_fn in losses:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
# What a repeated call is compared with: whatever comes between the two and makes the second one right.
_SINCE = {
    "scaler_step": ("scaler_step", "update", "handed", "make_scaler", "owned_step"),
    "update": ("update", "scaler_step", "unscale", "handed", "make_scaler", "owned_step"),
    "opt_step": (
        "opt_step",
        "backward",
        "owned_backward",
        "autograd_grad",
        "zero_grad",
        "scaler_step",
        "owned_step",
        "handed",
        "set_optimizer",
    ),
}


class StepRepeated(TraceRule):
    """A step or an update is repeated without anything between the two."""

    code = "HS114"
    name = "step-repeated"
    severity = "error"
    reason = (
        "Between two calls of `scaler.update()` each optimizer may be stepped once: a second `scaler.step(optimizer)` raises "
        "RuntimeError: step() has already been called since the last update(). A second `update()` without a step raises "
        "AssertionError: No inf checks were recorded prior to update. A second `optimizer.step()` raises nothing and applies the "
        "same gradients twice."
    )
    bad = (
        _LOOP.format(again="    scaler.step(optimizer)\n"),
        _LOOP.format(again="    scaler.update()\n"),
        "import torch\nfor x, y in loader:\n    optimizer.zero_grad()\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n"
        "        loss = loss_fn(model(x), y)\n    loss.backward()\n    optimizer.step()\n    optimizer.step()\n",
    )
    good = (_LOOP.format(again=""), _TWO_LOSSES)
    references = ("https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler.step",)
    kinds = ("scaler_step", "update", "opt_step")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A call whose predecessor of this kind is still in effect."""
        event = trace[index]
        if _has_arguments(event) or switched_off(script, event):
            return None
        before = self._before(trace, index)
        if before is None or before.node is event.node or before.loops != event.loops or not repeats(event):
            return None
        if _has_arguments(before) or rebound_between(script, before, event):
            return None
        if before.node in caught_block(event.node, script.above(event.node)):
            return None  # the first of the two raised
        if event.kind == "opt_step":
            if not implied(before, event) or _sets_gradients(before, event):
                return None
            message = (
                f"`{event.local.optimizer}.step()` applies the gradients that line {_line(before)} has already applied"
            )
            return self.finding(script.where(event.node), message, instead="step once per backward", severity="warning")
        if not only_settings(script, before, event):
            return None
        is_known = script.scalers_named(event.scaler) or is_passed_in(script, trace, event)
        if event.kind == "update" and not is_known:
            return None
        if event.kind == "update":
            message = f"`{event.local.scaler}.update()` repeats line {_line(before)} without a step between: this raises AssertionError"
        else:
            message = f"line {_line(before)} has already stepped `{event.local.optimizer}` since the last update(): this raises RuntimeError"
        return self.finding(script.where(event.node), message, instead="remove one of the two")

    @staticmethod
    def _before(trace: Trace, index: int) -> Event | None:
        """The previous call of this kind, for the same optimizer or scaler, if it is still in effect."""
        event = trace[index]
        for i in earlier(trace, index, *_SINCE[event.kind]):
            before = trace[i]
            if before.kind != event.kind:
                other = event.kind == "scaler_step" and before.kind == "update" and before.scaler != event.scaler
                if other or (before.kind == "set_optimizer" and before.optimizer != event.optimizer):
                    continue
                return None
            if event.kind == "update":
                return before if before.scaler == event.scaler else None
            if before.optimizer == event.optimizer and before.scaler == event.scaler:
                return before if is_one(event.optimizer) else None
        return None


def _has_arguments(event: Event) -> bool:
    """Whether a call passes more than usual: a closure to an optimizer, a new scale to update."""
    call, usual = event.node, 1 if event.kind == "scaler_step" else 0
    return isinstance(call, ast.Call) and len(call.args) + len(call.keywords) > usual


def _sets_gradients(before: Event, event: Event) -> bool:
    """Whether the function of a step writes gradients itself before it, and after the previous step: `p.grad = total / n`."""
    first = _line(before) if before.function is event.function else 0
    for node in ast.walk(event.function.node):
        if isinstance(node, ast.Assign | ast.AugAssign) and first < node.lineno < _line(event):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Attribute) and t.attr == "grad" for t in targets):
                return True
    return False


def _line(event: Event) -> int:
    return int(getattr(event.node, "lineno", 0))


RULES: tuple[type[Rule], ...] = (StepRepeated,)
