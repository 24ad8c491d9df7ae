"""HS195: learning-rate schedules that advance before the optimizer steps."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import (
    TraceRule,
    earlier,
    later,
    loops_around,
    only_settings,
)
from halfstep.check.script.flow.phases import hooked_schedules
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import length_of, micro_batches
from halfstep.check.script.objects.expressions import arguments_of, conditions_of
from halfstep.check.script.objects.formats import returned_by
from halfstep.check.script.objects.values import argument, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import last_name_of

__all__ = ["PHASE", "RULES", "SCHEDULES"]

_TRAIN = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
# `epoch < warmup_epochs` chooses between schedules; each advances once per iteration.
PHASE = regex(r"^[\w.]*(epoch|iter|step)s? (<|<=|>|>=) (?!.*%)")
_NAMES = regex(r"\w+")
_BACKWARDS = ("backward", "owned_backward")
_STEPS = ("scaler_step", "opt_step", "owned_step", "handed")
_ACTIVE = {*_STEPS, *_BACKWARDS}
# Classes of torch or like them, and functions of transformers; one that a project calls otherwise may set the rate to use next.
SCHEDULES = regex(r"LR$|^get_\w*schedule\w*$|^CosineAnnealingWarmRestarts$")
_BF16 = """\
import torch
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""


class SchedulerBeforeStep(TraceRule):
    """scheduler.step is called before the optimizer steps."""

    code = "HS195"
    name = "scheduler-before-step"
    severity = "advice"
    reason = "The first learning rate of the schedule is skipped. PyTorch warns: Detected call of `lr_scheduler.step()` before `optimizer.step()`."
    bad = (
        _BF16.replace("    optimizer.step()", "    scheduler.step()\n    optimizer.step()"),
        _BF16.replace(
            "import torch\n", "import torch\nscheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, 1000)\n"
        ).replace("    optimizer.zero_grad()", "    scheduler.step()\n    optimizer.zero_grad()"),
    )
    good = (_BF16 + "    scheduler.step()\n", _TRAIN)
    references = ("https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate",)
    kinds = ("sched_step",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Schedules in traces, and those that a hook of Lightning advances before the optimizer steps."""
        yield from super().check(script)
        for call, hook in hooked_schedules(script):
            yield self.finding(
                script.where(call),
                f"`{text_of(call)}` runs in `{hook.name}`, before the optimizer steps: the first learning rate is skipped",
                instead=f"call it in `{hook.name.removesuffix('start')}end`, or return the scheduler from configure_optimizers",
            )

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A scheduler step between a backward and its optimizer step."""
        event = trace[index]
        if isinstance(event.node, ast.Call) and text_of(event.node.func).endswith("step_update"):
            return None
        if isinstance(event.node, ast.Call) and script.outline.call_target(event.node, event.function) is not None:
            return None  # a class of this file may set the learning rate of the coming step
        if not isinstance(script.statement(event.node), ast.Expr):
            return None  # torch's return nothing; `lr = scheduler.step()` sets the learning rate of the coming step
        if "swa" in event.subject.lower():
            return None  # stochastic weight averaging starts after many steps
        if any(map(script.outline.classes.__contains__, _classes_of(script, event))):
            return None  # the same, of an object that a function creates
        when, place = self._early(script, trace, index)
        if when:
            call = f"{event.local.subject}.step()"
            return self.finding(
                script.where(event.node), f"`{call}` runs {when} skipped", instead=f"call {call} {place}"
            )
        back = next(earlier(trace, index, *_BACKWARDS, "scaler_step", "opt_step"), None)
        step = next(later(trace, index, "scaler_step", "opt_step", *_BACKWARDS), None)
        if back is None or step is None or trace[back].kind not in _BACKWARDS or trace[step].kind in _BACKWARDS:
            return None
        # The backward may be in an inner loop over micro-batches.
        if not event.loops or trace[back].loops[: len(event.loops)] != event.loops or trace[step].loops != event.loops:
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.subject}.step()` runs before the optimizer step: the first learning rate is skipped",
            instead=f"call {event.subject}.step() after the optimizer step",
        )

    def _early(self, script: Script, trace: Trace, index: int) -> tuple[str, str]:
        """When a scheduler advances too early, and where it belongs; "" if it does not."""
        if self._opens_epoch(script, trace, index):
            return (
                "at the start of the epoch, before the optimizer steps: the first learning rate is",
                "at the end of the epoch",
            )
        after = "after the optimizer step"
        if _opens_run(script, trace, index):
            return "before the first step of the optimizer: the first learning rate is", after
        if self._opens_iteration(script, trace, index):
            return "at the start of the iteration, before the optimizer steps: the first learning rate is", after
        if (window := self._in_micro_batch(script, trace, index)) is not None:
            first = f"and the optimizer first steps when `{window}`: the first learning rates are"
            return f"on every micro-batch, {first}", "where the optimizer steps"
        if (length := self._in_window_loop(script, trace, index)) is not None:
            return (
                f"for each of the `{length}` micro-batches before the optimizer steps: the first learning rates are",
                after,
            )
        return "", ""

    @staticmethod
    def _in_micro_batch(script: Script, trace: Trace, index: int) -> str | None:
        """The end of the accumulation window for which each step of the loop waits, and the schedule does not."""
        event = trace[index]
        if not event.loops or event.accumulating or not _has_no_argument(event):
            return None
        near = [e for e in trace if e.loops == event.loops and e.function is event.function]
        steps = [e for e in near if e.kind in {"scaler_step", "opt_step"} and compatible(e, event)]
        if not steps or any(e.kind in {"owned_step", "handed"} for e in near):
            return None
        ends = [
            next((g for g in e.accumulating if g.is_true and g not in event.guards and "+ 1) %" in g.text), None)
            for e in steps
        ]
        lengths = [length_of(script, guard) if guard is not None else "" for guard in ends]
        if not all(length and _is_above_one(script, length) for length in lengths):
            return None
        return ends[0].text if ends[0] is not None and only_settings(script, event, steps[0]) else None

    @staticmethod
    def _in_window_loop(script: Script, trace: Trace, index: int) -> str | None:
        """n, where a scheduler advances in the loop `for micro in range(n)` whose gradients the step after it uses."""
        event, loops = trace[index], loops_around(script, trace[index])
        length = micro_batches(loops[-1]) if loops else ""
        back = next(earlier(trace, index, *_BACKWARDS, *_STEPS), None)
        step = next(later(trace, index, *_STEPS), None)
        if not length or back is None or step is None or not _has_no_argument(event):
            return None
        if trace[back].kind not in _BACKWARDS or not trace[back].loops == event.loops == (
            *trace[step].loops,
            event.loops[-1],
        ):
            return None
        return length if only_settings(script, event, trace[back]) and compatible(event, trace[step]) else None

    @staticmethod
    def _opens_iteration(script: Script, trace: Trace, index: int) -> bool:
        """Whether a scheduler advances in each iteration before the backward whose step it is for."""
        event = trace[index]
        if not event.loops or not _has_no_argument(event):
            return False
        if any(e.loops == event.loops and e.kind in _ACTIVE for e in trace[:index]):
            return False
        back = next(later(trace, index, *_BACKWARDS), None)
        step = next(later(trace, index, "scaler_step", "opt_step"), None)
        if back is None or step is None or back > step or not trace[back].loops == event.loops == trace[step].loops:
            return False
        values = script.outline.values(event.local.subject, event.function)
        names = [text_of(v.func).rsplit(".", 1)[-1] if isinstance(v, ast.Call) else "" for v in values]
        phases = tuple(g for g in event.guards if not PHASE.match(g.text))
        always = dataclasses.replace(event, guards=phases)
        return bool(names) and all(map(SCHEDULES.search, names)) and only_settings(script, always, trace[step])

    @staticmethod
    def _opens_epoch(script: Script, trace: Trace, index: int) -> bool:
        """Whether one of torch's schedulers advances in each epoch before the loop whose steps it is for."""
        event = trace[index]
        if not event.loops or not _has_no_argument(event):
            return False
        if any(e.kind in {"scaler_step", "opt_step", "owned_step", "handed"} for e in trace[:index]):
            return False
        step = next(later(trace, index, "scaler_step", "opt_step"), None)
        if step is None or trace[step].loops[: len(event.loops)] != event.loops or trace[step].loops == event.loops:
            return False
        values = script.outline.values(event.local.subject, event.function)
        names = [script.outline.names.full(v.func) if isinstance(v, ast.Call) else "" for v in values]
        return (
            bool(names)
            and all(n.startswith("torch.optim.") for n in names)
            and only_settings(script, event, trace[step])
        )


def _classes_of(script: Script, event: Event) -> list[str]:
    """What a schedule is created by: classes and functions, as the text names them, also through functions of the file."""
    outline, names = script.outline, []
    waiting = [(value, 2) for value in outline.values(event.local.subject, event.function)]
    while waiting:
        value, depth = waiting.pop()
        if not isinstance(value, ast.Call):
            continue
        builder = next((f for f in outline.functions if f.name == last_name_of(value.func)), None)
        if builder is None or not depth:
            names.append(text_of(value.func))
        else:
            # From the tree: the outline names a builder without a word of precision, and does not walk it.
            assigns = [n for n in ast.walk(builder.node) if isinstance(n, ast.Assign)]
            for returned in returned_by(builder):
                bound = [n.value for n in assigns if key_of(returned) in map(key_of, n.targets) and key_of(returned)]
                waiting += [(v, depth - 1) for v in bound or [returned]]
    return names


def _opens_run(script: Script, trace: Trace, index: int) -> bool:
    """Whether one of torch's schedules advances once between its creation and the loop in which the optimizer steps.

    A schedule that starts at 0 may be advanced on purpose, one that a condition advances may continue another run.
    """
    event, outline = trace[index], script.outline
    if event.loops or not _has_no_argument(event) or any(e.kind in _STEPS for e in trace[:index]):
        return False
    step = next(later(trace, index, "scaler_step", "opt_step"), None)
    if step is None or not trace[step].loops:
        return False
    bound = [b for b in outline.lookup(event.local.subject, event.function) if b.value is not None]
    if len(bound) != 1 or bound[0].function is not event.function:
        return False
    value, tests = bound[0].value, conditions_of(outline, event.node)
    if not isinstance(value, ast.Call) or not outline.names.full(value.func).startswith("torch.optim.lr_scheduler."):
        return False
    loads = any(e.kind == "load_optimizer" for e in trace[:index]) or argument(value, None, "last_epoch") is not None
    return conditions_of(outline, value) == tests and not loads and not _may_start_at_zero(script, value)


def _may_start_at_zero(script: Script, schedule: ast.Call) -> bool:
    """Whether a schedule may start with a learning rate of 0: a function that divides its step, `step / warmup`, or an unknown one."""
    if last_name_of(schedule.func) not in {"LambdaLR", "MultiplicativeLR"}:
        return False
    rate = argument(schedule, 1, "lr_lambda")
    defined = next((f.node for f in script.outline.functions if f.name == key_of(rate)), None)
    node = rate if isinstance(rate, ast.Lambda) else defined
    if not isinstance(node, (ast.Lambda, ast.FunctionDef)) or not node.args.args:
        return True
    step = node.args.args[0].arg
    divided = [n.left for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, (ast.Div, ast.Mult))]
    return any(text_of(left).removeprefix("float(").rstrip(")") == step for left in divided)


def _has_no_argument(event: Event) -> bool:
    return not (isinstance(event.node, ast.Call) and arguments_of(event.node))


def _is_above_one(script: Script, length: str) -> bool:
    """Whether the text names a number above 1 for the length of a window, as its value or as the default of its option, and no 1."""
    name = _NAMES.findall(length)[-1]
    option = name.replace("_", "[_-]")
    value = rf"\b{name}\b['\"]?(?:\]|: ?int)? ?[=:,] ?(\d+)\b(?!\.)|--{option}\b[^\n]*\n?[^\n]*default=(\d+)\b"
    numbers = {name} if name.isdigit() else {a or b for a, b in re.findall(value, script.source.text)}
    return bool(numbers) and not numbers & {"0", "1"}


RULES: tuple[type[Rule], ...] = (SchedulerBeforeStep,)
