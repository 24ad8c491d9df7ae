"""HS119, HS156, HS183: gradients that are not cleared, cleared before their step, or stepped with before they are complete."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.flow.divisions import is_divided_by_value
from halfstep.check.script.flow.emptied import may_be_cleared, never_computed, not_computed_when, stepped_empty
from halfstep.check.script.flow.event import Event, Guard, compatible
from halfstep.check.script.flow.gradients import (
    backward_of_other_branch,
    clears,
    dropped_loss,
    moves_gradients,
    never_stepped,
    steps_only,
)
from halfstep.check.script.flow.order import (
    STEPS,
    TraceRule,
    between,
    earlier,
    later,
    only_settings,
    without_amp,
)
from halfstep.check.script.flow.stuck import stuck_window
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import ACCUMULATION, window_of_clearing, window_of_loop
from halfstep.check.script.objects.engines import engine_at
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.scaling.listed import left_out
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_NOT_FINITE = regex(r"is_?(finite|nan|inf)\w*\(", re.IGNORECASE)
_GRADIENT = regex(r"norm|grad", re.IGNORECASE)
# Calls that may clear the gradients or return to an earlier state.
_RECOVERS = regex(r"zero|clear|reset|\.grad\b|recover|restore|load|handle|skip_\w*\(", re.IGNORECASE)
_BACKWARDS = ("backward", "owned_backward")
_STEPS_ITSELF = regex(r"deepspeed|lightning|hook|megatron|colossalai", re.IGNORECASE)
_SCHEDULES = regex(r"LR$|[Ss]chedul|^(len|print|type|isinstance)$")
_WRAPS = frozenset({"prepare", "setup", "setup_optimizers"})
_PLAIN = """\
import torch
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
{start}    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
{between}    optimizer.step()
"""
_WINDOW = """\
import torch
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y) / accumulation_steps
    loss.backward()
{always}    if (i + 1) % accumulation_steps == 0:
{last}        optimizer.zero_grad()
"""
_CLEAR = "    optimizer.zero_grad()\n"
_COUNTED = "import torch\ni = 0\n" + _WINDOW.format(always="", last="        optimizer.step()\n").replace(
    "import torch\nfor i, (x, y) in enumerate(loader):", "for x, y in loader:"
)


_OVERFLOW = """\
import torch
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for x, y in loader:
    with amp.scale_loss(loss_fn(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
{zero}
"""
_SKIP = """\
import torch

for x, y in loader:
{start}    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        {skip}continue
    optimizer.step()
{end}"""


class KeptAfterOverflow(TraceRule):
    """Gradients that are inf or NaN are not cleared when their step is skipped."""

    code = "HS119"
    name = "gradients-kept-after-overflow"
    severity = "warning"
    reason = (
        "`backward` adds to the gradients, and inf or NaN plus anything is not finite. Where `zero_grad()` is skipped together with the "
        "step, one overflow therefore makes every later norm non-finite: no step is done any more, and nothing raises. With Apex the "
        "first overflow is normal, because the loss scale starts at 65536."
    )
    bad = (
        _OVERFLOW.format(zero="        optimizer.zero_grad()"),
        _SKIP.format(start="", skip="", end="    optimizer.zero_grad()\n"),
        _SKIP.format(start="", skip="print('skipped')\n        ", end="    optimizer.zero_grad()\n"),
    )
    good = (
        _OVERFLOW.format(zero="    optimizer.zero_grad()"),
        _SKIP.format(start="    optimizer.zero_grad()\n", skip="", end=""),
        _SKIP.format(start="", skip="optimizer.zero_grad()\n        ", end="    optimizer.zero_grad()\n"),
    )
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",)
    kinds = ("opt_step", "scaler_step")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A step under a test of the gradients, with every clearing of them under the same test."""
        event = trace[index]
        back = next((trace[i] for i in earlier(trace, index, "backward")), None)
        if back is None or back.loops != event.loops or without_amp(event):
            return None
        is_apex = back.inside("scaled_loss") is not None
        if not is_apex and not any(e.kind == "enter_autocast" for e in trace):
            return None
        cleared = [e for e in trace if e.kind == "zero_grad" and len(e.loops) >= len(event.loops)]
        for guard in event.guards:
            if guard in back.guards or not _tests_gradients(script, guard, event):
                continue
            updates = [e for e in trace if e.kind == "update" and e.scaler == event.scaler]
            if event.kind == "scaler_step" and all(guard in e.guards for e in updates):
                continue  # HS112 and HS157 report the update that is missing
            place = _skipped(event, guard) if cleared and all(guard in e.guards for e in cleared) else None
            if place is None:
                continue
            return self.finding(
                script.where(place),
                f"where `{guard.text}` is {str(not guard.is_true).lower()}, the gradients are not cleared either: they stay inf or NaN, "
                "and every later step is skipped",
                instead=f"call {cleared[0].local.optimizer}.zero_grad() here as well"
                if cleared[0].local.optimizer
                else "",
                severity="error" if is_apex else None,
            )
        return None


def _tests_gradients(script: Script, guard: Guard, event: Event) -> bool:
    """Whether a condition is that the gradients are finite: `isfinite(norm)`, or a flag with such a value."""
    texts = [guard.text]
    if guard.text.isidentifier():
        texts = [text_of(value) for value in script.outline.values(guard.text, event.function)]
    return any(_NOT_FINITE.search(text) and _GRADIENT.search(text) for text in texts)


def _skipped(event: Event, guard: Guard) -> ast.AST | None:
    """Where training continues with the gradients as they are, if a condition around a step is not met; None if it does not."""
    for test in (n for n in ast.walk(event.function.node) if isinstance(n, ast.If)):
        condition, is_true = test.test, guard.is_true
        while isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
            condition, is_true = condition.operand, not is_true
        either = condition.values if isinstance(condition, ast.BoolOp) and not guard.is_true else [condition]
        if guard.text in map(text_of, either):
            other = test.orelse if is_true else test.body
            if other and isinstance(other[-1], (ast.Raise, ast.Break)):
                return None
            is_cleared = any(_RECOVERS.search(ast.unparse(s)) for s in other)
            return None if is_cleared else other[-1] if other else test.test
    return None


class MisplacedZeroGrad(TraceRule):
    """Gradients are cleared between backward and step, or never, or nothing computes or uses them."""

    code = "HS156"
    name = "misplaced-zero-grad"
    severity = "error"
    reason = (
        "After `zero_grad()` every `.grad` is None, and the optimizer skips such parameters: with the call between `backward` and "
        "`step` nothing is trained, and nothing raises. Without the call `backward` adds to the gradients of all earlier batches: the "
        "steps follow their sum, which grows until the loss diverges or, in float16, the gradients overflow. A step that waits for a "
        "counter which only its own branch advances never runs, and an optimizer that only the branch without the scaler steps trains "
        "nothing in mixed precision."
    )
    bad = (
        _PLAIN.format(start="", between=_CLEAR),
        _PLAIN.format(start="", between=""),
        _PLAIN.format(start="", between=_CLEAR).replace("optimizer.step", "scheduler.step"),
        _COUNTED + "        i += 1\n",
    )
    good = (_PLAIN.format(start=_CLEAR, between=""), _COUNTED + "    i += 1\n")
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",)
    kinds = ("zero_grad", "opt_step", "scaler_step")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A zero_grad between a backward and its step, or a step in a script that never clears gradients."""
        judge = self._cleared if trace[index].kind == "zero_grad" else self._never
        return judge(script, trace, index)

    def _cleared(self, script: Script, trace: Trace, index: int) -> Finding | None:
        event = trace[index]
        if (loss := dropped_loss(script, trace, event)) is not None:
            return self.finding(
                script.where(loss),
                f"line {script.where(event.node).line} clears the gradients, but nothing uses `{text_of(loss)}`: without backward and step "
                "nothing is trained",
                instead=f"{text_of(loss)}.backward(), {event.local.optimizer}.step()",
            )
        if (empty := stepped_empty(script, trace, index)) is not None:
            return self.finding(
                script.where(event.node),
                f"nothing computes gradients between `{event.local.optimizer}.zero_grad()` and the step of line "
                f"{script.where(empty.node).line}, which has none to use",
                instead="clear the gradients after the step",
            )
        back = next(earlier(trace, index, *_BACKWARDS, *STEPS), None)
        step = next(later(trace, index, *_BACKWARDS, *STEPS), None)
        if back is None or step is None:  # the backward before the zero_grad, or after it in the same pass
            only = trace[next((i for i in (back, step) if i is not None), index)]
            return self._unused(script, trace, index, only) if only.kind in _BACKWARDS else None
        if trace[back].kind not in _BACKWARDS or trace[step].kind not in STEPS:
            return None
        use = trace[step]
        # The backward may be in a loop of its own, over the micro-batches of the step.
        if not trace[back].loops[: len(event.loops)] == event.loops == use.loops or use.kind == "owned_step":
            return None
        if not event.loops and not trace[back].function is event.function is use.function:
            return None
        if not clears(trace, event, use) or not only_settings(script, event, use):
            return None
        # Both at the end of one window, or neither.
        together = [g for g in event.accumulating if g in use.guards]
        early, late = (replace(e, guards=tuple(g for g in e.guards if g not in together)) for e in (event, use))
        if not only_settings(script, early, trace[back]) or not only_settings(script, late, trace[back]):
            return None
        if between(trace, back, step, "grad_read", "handed", "autograd_grad") or moves_gradients(
            script, trace[back], use
        ):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.local.optimizer}.zero_grad()` clears the gradients of line {script.where(trace[back].node).line} before the step of "
            f"line {script.where(use.node).line} uses them: nothing is trained",
            instead="clear the gradients after the step or before the backward",
        )

    def _unused(self, script: Script, trace: Trace, index: int, back: Event) -> Finding | None:
        """The finding for gradients that are cleared in a script whose schedule advances and whose optimizer never steps."""
        event, name = trace[index], trace[index].local.optimizer
        schedules = [e for e in trace if e.kind == "sched_step" and e.loops == event.loops]
        if not event.loops or back.loops != event.loops or back.function is not event.function or not schedules:
            return None
        if script.has(*STEPS, "engine_step", "handed", "stored", "autograd_grad", "grad_read"):
            return None
        # Under DeepSpeed `accelerator.backward` steps; hooks and Lightning's `manual_backward` have a step elsewhere.
        if _STEPS_ITSELF.search(script.source.text) or not steps_only(script, event) or name in event.function.params:
            return None
        nodes = {e.node for e in script.events("sched_step")}
        if any(call not in nodes for call, _ in script.outline.calls.get("step", ())) or _is_passed_on(script, name):
            return None
        return self.finding(
            script.where(back.node),
            f"line {script.where(event.node).line} clears these gradients, and no line of the file calls `{name}.step()`: nothing is trained",
            instead=f"{name}.step() after the backward",
        )

    def _never(self, script: Script, trace: Trace, index: int) -> Finding | None:
        event = trace[index]
        if event.kind == "opt_step" and (other := backward_of_other_branch(script, trace, index)) is not None:
            return self.finding(
                script.where(event.node),
                f"nothing computes gradients for `{event.local.optimizer}.step()`: only the other branch calls backward (line "
                f"{script.where(other.node).line}), so nothing is trained here",
                instead="loss.backward() before the step",
            )
        if event.kind == "opt_step" and (loss := never_computed(script, trace, index)) is not None:
            text = f"no line computes gradients for this step: `{loss.id}` (line {loss.lineno}) is only reported, so nothing is trained"
            return self.finding(script.where(event.node), text, instead=f"{loss.id}.backward() before the step")
        if event.kind == "opt_step" and (option := not_computed_when(script, trace, index)) is not None:
            return self.finding(
                script.where(event.node),
                f"when `{option.text}` is {str(not option.is_true).lower()}, no line computes gradients for this step, so nothing is trained",
                instead="loss.backward() on this path as well",
            )
        if event.kind == "opt_step" and (back := never_stepped(script, trace, index)) is not None:
            return self.finding(
                script.where(back.node),
                f"no step follows this backward: `{event.local.optimizer}.step()` (line {script.where(event.node).line}) is in the other "
                "branch, so nothing is trained here",
                instead=f"{back.local.scaler}.step({event.local.optimizer}) and {back.local.scaler}.update()",
            )
        if event.kind == "scaler_step" and (only := left_out(script, trace, index)) is not None:
            return self.finding(
                script.where(event.node),
                f"only the branch without the scaler steps {only.name} (line {script.where(only.step.node).line}): with the scaler "
                f"`{event.local.optimizer}` alone is trained",
                instead=f"{event.local.scaler}.step for every optimizer, then {event.local.scaler}.update()",
            )
        if not event.loops or script.has("owned_step", "engine_step"):
            return None
        if (stuck := stuck_window(script, event)) is not None:
            return self.finding(
                script.where(stuck.test),
                f"the step waits until {stuck.ends}, but `{stuck.counter}` advances only together with the step: if `{stuck.length}` "
                "is above 1, it never runs again, and nothing is trained",
                instead=f"count every micro-batch: `{stuck.counter} += 1` after the test, or the index of the loop",
            )
        before = next(earlier(trace, index, *_BACKWARDS), None)
        if before is None or without_amp(event):
            return None
        back = trace[before]
        if back.loops[: len(event.loops)] != event.loops or any(e.kind == "handed" for e in trace):
            return None
        if back.kind == "owned_backward" and engine_at(script, back.local.subject, back.function) is None:
            return None
        waits = replace(event, guards=tuple(g for g in event.guards if g not in event.accumulating))
        if not steps_only(script, event) or not only_settings(script, waits, back):
            return None
        if may_be_cleared(script, trace, event):
            return None
        name = event.local.optimizer
        elsewhere = any(e.kind == "zero_grad" and e.optimizer == event.optimizer for e in trace)
        return self.finding(
            script.where(event.node),
            f"{'only the other branch' if elsewhere else 'no line'} clears the gradients of `{name}`: each step uses the sum over all batches so far",
            instead=f"{name}.zero_grad() before each backward",
            severity="warning",
        )


def _is_passed_on(script: Script, name: str) -> bool:
    """Whether a function other than a schedule or a wrapper receives an optimizer, and may step it."""
    for callee, sites in script.outline.calls.items():
        if callee in _WRAPS or _SCHEDULES.search(callee):
            continue
        if any(key_of(value) == name for call, _ in sites for value in arguments_of(call)):
            return True
    return False


class StepEveryMicroBatch(TraceRule):
    """The optimizer steps on every micro-batch of a window whose gradients still accumulate."""

    code = "HS183"
    name = "step-every-micro-batch"
    severity = "warning"
    reason = (
        "Gradients are cleared once per accumulation window, but the step runs on every micro-batch. The first micro-batch of a window "
        "then counts in each of its steps, and the weights change while the window is being summed: n steps with parts of the gradient "
        "instead of one step with all of it."
    )
    bad = (_WINDOW.format(always="    optimizer.step()\n", last=""),)
    good = (_WINDOW.format(always="", last="        optimizer.step()\n"),)
    references = ("https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation",)
    kinds = ("opt_step", "scaler_step")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A step as often as the backward, with gradients cleared only at the end of a window."""
        event = trace[index]
        back = next(earlier(trace, index, "backward", *STEPS), None)
        if back is None or trace[back].kind != "backward" or trace[back].loops != event.loops or not event.loops:
            return None
        # A batch without a backward, whose loss is None, is stepped as well.
        if not only_settings(script, event, trace[back]) or set(trace[back].accumulating) - set(event.guards):
            return None
        others = {e.optimizer for e in trace if e.kind in STEPS} - {event.optimizer}  # a discriminator's
        cleared = [e for e in trace if e.kind == "zero_grad" and e.optimizer not in others and compatible(e, event)]
        if any(e.kind in {"handed", "owned_step"} for e in trace) or not cleared:
            return None
        inside = [e for e in cleared if e.loops[: len(event.loops)] == event.loops]
        length = window_of_clearing(script, inside, event) if inside else window_of_loop(script, event)
        if not length or not (ACCUMULATION.search(length) or is_divided_by_value(script, trace[back], length)):
            return None
        line = script.where((inside or cleared)[-1].node).line
        return self.finding(
            script.where(event.node),
            f"`{text_of(event.node)}` runs on every micro-batch, but line {line} clears the gradients once per `{length}`: each step "
            "uses a part of the window's sum",
            instead="step only at the end of the window, right before the gradients are cleared",
        )


RULES: tuple[type[Rule], ...] = (KeptAfterOverflow, MisplacedZeroGrad, StepEveryMicroBatch)
