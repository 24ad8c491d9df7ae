"""HS195-HS196: learning-rate schedules with a scaler that may skip steps."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.rules.scaler.bf16 import ScalerWithBf16
from halfstep.check.rules.scaler.calls import on_another_path
from halfstep.check.script.flow.absent import is_always_none
from halfstep.check.script.flow.event import Event, Guard, Loop, compatible, is_accumulation
from halfstep.check.script.flow.order import (
    TraceRule,
    earlier,
    is_amp,
    is_setting,
    later,
    loops_around,
    only_settings,
    switched_off,
)
from halfstep.check.script.flow.phases import hooked_schedules
from halfstep.check.script.flow.skipped import never_float16, reads_scale, same_scales, settled_by, tests_norm
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.unbound import unbound_scalers
from halfstep.check.script.flow.window import is_position, length_of, micro_batches, targets_of
from halfstep.check.script.objects.engines import ACCELERATE, engines_of, prepared_for, scaling_accelerator
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import last_name_of

__all__ = ["RULES"]

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
_PHASE = regex(r"^[\w.]*(epoch|iter|step)s? (<|<=|>|>=) (?!.*%)")
# A setting of a base class in another file: `self.scheduler_update_every_step`.
_PER_STEP = regex(r"^[\w.]*(every|per|each|on|by)_?(train_?)?(step|batch|iter(ation)?)\w*$", re.IGNORECASE)
_MODULO = regex(r"% ([A-Za-z_][\w.]*|\d+)")
_ITERATION = regex(r"(^|[._])(step|iter|iteration|it|itr|update|num_updates|global_step|iter_num|step_num)s?$")
_DATA = regex(r"^len\(|\.numel\(|\.size\(|\.shape|is None$")  # a batch that is left out
_TESTED_LOSS = regex(
    r"(?:torch|math|np)\.(isnan|isinf|isfinite)\([\w.]*loss\w*(?:\.item\(\))?\)(?:\.item\(\))?", re.IGNORECASE
)
_FINITE = regex(r"finite|nan|inf|norm|grad|overflow|scale", re.IGNORECASE)
_NAMES = regex(r"\w+")
_BACKWARDS = ("backward", "owned_backward")
_STEPS = ("scaler_step", "opt_step", "owned_step", "handed")
_ACTIVE = {*_STEPS, *_BACKWARDS}
# Classes of torch or like them, and functions of transformers; one that a project calls otherwise may set the rate to use next.
_SCHEDULE = regex(r"LR$|^get_\w*schedule\w*$|^CosineAnnealingWarmRestarts$")
_BF16 = """\
import torch
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""

_SKIPPED = {"optimizer_step_was_skipped", "step_was_skipped"}


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
        phases = tuple(g for g in event.guards if not _PHASE.match(g.text))
        always = dataclasses.replace(event, guards=phases)
        return bool(names) and all(map(_SCHEDULE.search, names)) and only_settings(script, always, trace[step])

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


def _has_no_argument(event: Event) -> bool:
    return not (isinstance(event.node, ast.Call) and arguments_of(event.node))


def _is_above_one(script: Script, length: str) -> bool:
    """Whether the text names a number above 1 for the length of a window, as its value or as the default of its option, and no 1."""
    name = _NAMES.findall(length)[-1]
    option = name.replace("_", "[_-]")
    value = rf"\b{name}\b['\"]?(?:\]|: ?int)? ?[=:,] ?(\d+)\b(?!\.)|--{option}\b[^\n]*\n?[^\n]*default=(\d+)\b"
    numbers = {name} if name.isdigit() else {a or b for a, b in re.findall(value, script.source.text)}
    return bool(numbers) and not numbers & {"0", "1"}


class SchedulerIgnoresSkips(TraceRule):
    """The learning-rate schedule advances when the scaler skips the step."""

    code = "HS196"
    name = "scheduler-ignores-skips"
    severity = "advice"
    reason = (
        "`scaler.step` silently skips the step when a gradient is inf or NaN, which is common in the first steps at a scale of 65536. A "
        "schedule that advances on every iteration counts skipped steps, so a warm-up of 100 steps applies fewer than 100."
    )
    bad = (_TRAIN + "    scheduler.step()\n",)
    good = (
        _TRAIN.replace("    scaler.step", "    before = scaler.get_scale()\n    scaler.step")
        + "    if scaler.get_scale() >= before:\n        scheduler.step()\n",
        _TRAIN.replace("    scaler.step", "    before = optimizer._step_count\n    scaler.step")
        + "    if optimizer._step_count > before:\n        scheduler.step()\n",
    )
    references = (
        "https://github.com/pytorch/pytorch/issues/44511",
        "https://github.com/pytorch/pytorch/issues/55585",
    )
    kinds = ("sched_step",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A scheduler step in the same iteration as scaler.step, in a script that never reads the scale."""
        event = trace[index]
        if "swa" in event.subject.lower():
            return None  # stochastic weight averaging: a few skipped steps do not matter
        idle = {s.key.rsplit(".", 1)[-1] for s in ScalerWithBf16.idle(script)}
        if not self._counts(script, event) or reads_scale(script) or is_always_none(script, event):
            return None
        # A scaler of the script's own skips steps that no engine knows of.
        own = any(script.scalers_named(e.scaler) for e in script.events("scaler_step"))
        if not own and any(not on_another_path(script, trace, engine, event) for engine in engines_of(script)):
            return self._unprepared(script, trace, index)
        loops = _loops(script, event, event.local.subject)
        steps = [trace[i] for i in earlier(trace, index, "scaler_step")]
        if any(trace[i].loops == event.loops != () for i in earlier(trace, index, "backward")):
            steps += [trace[i] for i in later(trace, index, "scaler_step") if trace[i].loops == event.loops]
        steps = [e for e in steps if loops in (e.loops, _loops(script, e, e.local.optimizer))]
        steps = [e for e in steps if e.scaler.rsplit(".", 1)[-1] not in idle]  # bfloat16 does not overflow; HS120
        steps = [e for e in steps if not switched_off(script, e) and not _is_remainder(trace, e)]
        steps = [e for e in steps if not never_float16(script, e) and not tests_norm(e.guards)]
        steps = [e for e in steps if e.function is event.function or event.loops]
        settled = settled_by(script, same_scales(script))
        always = _without_alternatives(trace, event)
        always = dataclasses.replace(always, guards=tuple(g for g in always.guards if g not in settled))
        steps = [e for e in steps if compatible(e, event) and self._in_each_pass(script, always, e)]
        # An attribute that no method sets skips nothing (HS132); a variable may be one that a fragment does not show.
        missing = {e.local.scaler for e in unbound_scalers(script)} if steps else set()
        steps = [e for e in steps if e.local.scaler not in missing or e.local.scaler.isidentifier()]
        if not steps:
            return None
        scaler = steps[0].local.scaler
        call = text_of(event.node.func) if isinstance(event.node, ast.Call) else event.local.subject
        tests = [settled[g] for g in event.guards if g in settled]
        compared = (
            f": {script.at(tests[0])} compares the scale before `update`, which alone changes it" if tests else ""
        )
        return self.finding(
            script.where(event.node),
            f"`{call}()` also runs when `{scaler}` skips the optimizer step" + compared,
            instead=f"call {call}() only if {scaler}.get_scale() did not decrease",
        )

    def _unprepared(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a schedule that an Accelerator does not know, next to the step of an optimizer that it prepares."""
        event, engine = trace[index], scaling_accelerator(script)
        created = [v for v in script.outline.values(event.subject, event.function) if isinstance(v, ast.Call)]
        names = [last_name_of(call.func) for call in created]
        if engine is None or not event.loops or not names or not all(map(_SCHEDULE.search, names)):
            return None
        prepared = prepared_for(script, ACCELERATE, event)
        if not prepared.is_complete or last_name(event.subject) in prepared.names or _asks_engine(script):
            return None
        steps = [e for e in trace[:index] if e.kind == "opt_step" and last_name(e.optimizer) in prepared.names]
        steps = [e for e in steps if e.loops == event.loops and compatible(e, event)]
        if not any(self._in_each_pass(script, _without_alternatives(trace, event), e) for e in steps):
            return None
        return self.finding(
            script.where(event.node),
            f"in fp16, `{event.local.subject}.step()` also runs when `{engine.key}` skips the optimizer step: it was not passed to `{engine.key}.prepare`",
            instead=f"call it only if not {engine.key}.optimizer_step_was_skipped, or prepare the scheduler, which then counts the steps of all processes",
        )

    @staticmethod
    def _counts(script: Script, event: Event) -> bool:
        """Whether a schedule counts iterations; one with a metric, as of ReduceLROnPlateau, or with an epoch does not."""
        call = event.node
        if not isinstance(call, ast.Call) or (isinstance(call.func, ast.Attribute) and call.func.attr == "step_update"):
            return True
        values = arguments_of(call)
        if len(values) != 1:
            return not values
        return bool(_ITERATION.search(key_of(values[0]))) or is_position(script, event, values[0])

    @staticmethod
    def _in_each_pass(script: Script, event: Event, step: Event) -> bool:
        """Whether a schedule advances wherever a step may be skipped, if only at the end of an accumulation window."""
        waits = [g for g in step.guards if g not in event.guards and not (is_amp(g) or is_setting(script, g, step))]
        windows = {number for g in step.guards for number in _MODULO.findall(g.text)}
        same = [g for g in event.guards if windows.intersection(_MODULO.findall(g.text))]  # one window, written twice
        same += [g for g in event.guards if _PHASE.match(g.text) or _is_per_step(script, g, event)]
        same += [g for g in event.guards if _TESTED_LOSS.fullmatch(g.text)]  # gradients overflow at a finite loss
        guards = tuple(g for g in event.guards if g in step.guards or g not in same)
        return only_settings(script, dataclasses.replace(event, guards=guards), step) and all(
            is_accumulation(g) or _is_flag(script, g, step) or _DATA.search(g.text) or _TESTED_LOSS.fullmatch(g.text)
            for g in waits
        )


def _asks_engine(script: Script) -> bool:
    """Whether the script asks whether a step was skipped, or prepares a schedule by itself."""
    return "prepare_scheduler" in script.outline.calls or not _SKIPPED.isdisjoint(script.outline.loads)


def _without_alternatives(trace: Trace, event: Event) -> Event:
    """The event without the conditions in whose other branch another schedule advances: `if warm: a.step() else: b.step()`."""
    others = [e for e in trace if e.kind == "sched_step" and e is not event and e.loops == event.loops]
    chosen = {g for g in event.guards if any(g.opposite in e.guards for e in others) and not _FINITE.search(g.text)}
    return dataclasses.replace(event, guards=tuple(g for g in event.guards if g not in chosen))


def _is_flag(script: Script, guard: Guard, step: Event) -> bool:
    """Whether a condition is a flag like `run_step`, and not a test of the gradients, after which the scaler skips nothing."""
    if not guard.text.isidentifier() or _FINITE.search(guard.text):
        return False
    values = script.outline.values(guard.text, step.function)
    return bool(values) and not any(_FINITE.search(text_of(value)) for value in values)


def _is_per_step(script: Script, guard: Guard, event: Event) -> bool:
    """Whether a condition is a setting, named for stepping per batch, that nothing assigns where the schedule advances."""
    key = guard.text.partition("#")[0]
    bound = [b for b in script.outline.bindings.get(key, ()) if b.function is event.function]
    loops = [n for n in script.above(event.node) if isinstance(n, (ast.For, ast.AsyncFor, ast.While))]
    before = loops[-1].lineno if loops else 0  # what precedes the loops of a function is set once
    is_set = all(isinstance(b.function.node, ast.Module) or getattr(b.node, "lineno", 0) < before for b in bound)
    return guard.is_true and bool(_PER_STEP.match(key)) and is_set


def _loops(script: Script, event: Event, variable: str) -> tuple[Loop, ...]:
    """The loops around an event, without an innermost one over the schedules or optimizers that it steps."""
    loops = loops_around(script, event)
    is_over = len(loops) == len(event.loops) > 0 and variable in targets_of(loops[-1])
    return event.loops[:-1] if is_over else event.loops


def _is_remainder(trace: Trace, step: Event) -> bool:
    """Whether a step is the last of an epoch, for what remains of a window after the loop that has the other steps."""
    depth = len(step.loops)
    others = [e for e in trace if e.kind == "scaler_step" and (e.scaler, e.optimizer) == (step.scaler, step.optimizer)]
    return any(len(e.loops) > depth and e.loops[:depth] == step.loops for e in others)


RULES: tuple[type[Rule], ...] = (SchedulerBeforeStep, SchedulerIgnoresSkips)
