"""HS196: learning-rate schedules with a scaler that may skip steps."""

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
from halfstep.check.rules.script.schedule import PHASE, SCHEDULES
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
    scalers_at,
    switched_off,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.unbound import unbound_scalers
from halfstep.check.script.flow.window import targets_of
from halfstep.check.script.objects.engines import ACCELERATE, Engine, engines_of, scaling_accelerator, scaling_fabric
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.scaling.attached_schedules import attached_schedules, processed_steps
from halfstep.check.script.scaling.finite_tests import tests_norm
from halfstep.check.script.scaling.lightning_schedules import stepwise_schedules
from halfstep.check.script.scaling.positions import is_position
from halfstep.check.script.scaling.prepared import prepared_for
from halfstep.check.script.scaling.scale_tests import never_float16, reads_scale, same_scales, settled_by
from halfstep.check.script.scaling.set_rates import rates_by_iteration, sets_rates
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
_COUNTED = (
    _TRAIN.replace(
        "    optimizer.zero_grad()", '    optimizer.param_groups[0]["lr"] = rate(num_steps)\n    optimizer.zero_grad()'
    )
    + "    {count}\n"
)
# A setting of a base class in another file: `self.scheduler_update_every_step`.
_PER_STEP = regex(r"^[\w.]*(every|per|each|on|by)_?(train_?)?(step|batch|iter(ation)?)\w*$", re.IGNORECASE)
_MODULO = regex(r"% ([A-Za-z_][\w.]*|\d+)")
_ITERATION = regex(r"(^|[._])(step|iter|iteration|it|itr|update|num_updates|global_step|iter_num|step_num)s?$")
_DATA = regex(r"^len\(|\.numel\(|\.size\(|\.shape|is None$")  # a batch that is left out
_TESTED_LOSS = regex(
    r"(?:torch|math|np)\.(isnan|isinf|isfinite)\([\w.]*loss\w*(?:\.item\(\))?\)(?:\.item\(\))?", re.IGNORECASE
)
_FINITE = regex(r"finite|nan|inf|norm|grad|overflow|scale", re.IGNORECASE)
# Stochastic weight averaging, for which a few skipped steps do not matter, and schedules of the weight decay or of a momentum.
_OTHER = regex(r"swa|(^|[._])(wd|weight_decay|momentum)_", re.IGNORECASE)
_CREATES_SCHEDULE = regex(r"LR$|[sS]chedul|^CosineAnnealingWarmRestarts$")
_OF_EPOCH = regex(r"^[\w.]*epoch (==|<|<=) ")
_METRICS = {"metric", "metrics"}
_SKIPPED = {"optimizer_step_was_skipped", "step_was_skipped"}


class SchedulerIgnoresSkips(TraceRule):
    """The learning-rate schedule advances when the scaler skips the step."""

    code = "HS196"
    name = "scheduler-ignores-skips"
    severity = "advice"
    reason = (
        "`scaler.step` silently skips the step when a gradient is inf or NaN, which is common in the first steps at a scale of 65536. A "
        "schedule that advances on every iteration counts skipped steps, so a warm-up of 100 steps applies fewer than 100. So does a learning "
        "rate that the script computes itself, or with `scheduler(step)`, from a number of iterations, their share of an epoch or a counter "
        "that it increments after `scaler.step`. An Accelerator waits with the schedules that it prepares, unless step_scheduler_with_optimizer=False; "
        'Fabric does not, nor does the Trainer of Lightning with a schedule whose interval is "step".'
    )
    bad = (_TRAIN + "    scheduler.step()\n", _COUNTED.format(count="num_steps += 1"))
    good = (
        _TRAIN.replace("    scaler.step", "    before = scaler.get_scale()\n    scaler.step")
        + "    if scaler.get_scale() >= before:\n        scheduler.step()\n",
        _TRAIN.replace("    scaler.step", "    before = optimizer._step_count\n    scaler.step")
        + "    if optimizer._step_count > before:\n        scheduler.step()\n",
        _COUNTED.format(count="num_steps += int(scaler.get_scale() >= before)").replace(
            "    scaler.step", "    before = scaler.get_scale()\n    scaler.step"
        ),
    )
    references = (
        "https://github.com/pytorch/pytorch/issues/44511",
        "https://github.com/pytorch/pytorch/issues/55585",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/5558",
    )
    kinds = ("sched_step",)
    lines = ("configure_optimizers",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Schedules that advance, and learning rates that a loop without one computes itself."""
        for node in stepwise_schedules(script):
            yield self.finding(
                script.where(node),
                "in float16 the Trainer of Lightning advances this schedule in each iteration, also when its scaler skips the optimizer step",
                instead="override lr_scheduler_step to compare the scale, or train in bf16-mixed",
            )
        reported = list(super().check(script))
        yield from reported
        # In bfloat16 gradients do not overflow.
        formats = {dtype for autocast in script.autocasts for dtype in autocast.dtypes}
        if formats == {"bfloat16"}:
            return
        yield from self._attached(script)
        steps = [(trace, e) for trace in script.traces for e in trace if e.kind == "scaler_step"]
        if not steps or not sets_rates(script) or reads_scale(script):
            return
        if engines_of(script) and not any(script.scalers_named(e.scaler) for e in script.events("scaler_step")):
            return
        by_loop = {r.loop: (r, step) for step in _skippable(script, steps) for r in rates_by_iteration(script, step)}
        lines = [finding.line for finding in reported]
        for rate, step in by_loop.values():
            inside = range(rate.loop.lineno, (rate.loop.end_lineno or 0) + 1)
            if not any(line in inside for line in lines) and not _is_disabled(script, step):
                yield self.finding(
                    script.where(rate.node),
                    f"the learning rate follows `{rate.counter}`, which also counts iterations in which `{step.local.scaler}` skips the "
                    "optimizer step",
                    instead=f"count the steps for which {step.local.scaler}.get_scale() did not decrease",
                )

    def _attached(self, script: Script) -> Iterator[Finding]:
        """The schedules that an engine of ignite advances in each iteration of a function that steps with a scaler."""
        attached = dict(attached_schedules(script)) if script.outline.names.uses("ignite") else {}
        if not attached or reads_scale(script):
            return
        steps = [(trace, e) for trace in script.traces for e in trace if e.kind == "scaler_step"]
        step = next(iter(processed_steps(script, _skippable(script, steps))), None)
        for node, name in attached.items() if step is not None else ():
            assert step is not None
            yield self.finding(
                script.where(node),
                f"`{name}` advances in each iteration, also when `{step.local.scaler}` skips the optimizer step",
                instead=f"advance it in `{step.function.name}`, only if {step.local.scaler}.get_scale() did not decrease",
            )

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A scheduler step in the same iteration as scaler.step, in a script that never reads the scale."""
        event = trace[index]
        if _OTHER.search(event.subject):
            return None
        if not self._counts(script, event) or reads_scale(script) or is_always_none(script, event):
            return None
        # A scaler of the script's own skips steps that no engine knows of.
        own = any(script.scalers_named(e.scaler) for e in script.events("scaler_step"))
        if not own and any(not on_another_path(script, trace, engine, event) for engine in engines_of(script)):
            return self._unprepared(script, trace, index)
        loops = _loops(script, event, event.local.subject)
        steps = [trace[i] for i in earlier(trace, index, "scaler_step")]
        if event.loops:  # also at the start of an iteration
            steps += [trace[i] for i in later(trace, index, "scaler_step") if trace[i].loops == event.loops]
        steps = [e for e in steps if loops in (e.loops, _loops(script, e, e.local.optimizer))]
        steps = _skippable(script, [(trace, e) for e in steps], event)
        steps = [e for e in steps if e.function is event.function or event.loops]
        settled = settled_by(script, same_scales(script))
        always = _without_alternatives(trace, event)
        always = dataclasses.replace(always, guards=tuple(g for g in always.guards if g not in settled))
        steps = [e for e in steps if compatible(e, event) and self._in_each_pass(script, always, e)]
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
        """The finding for a schedule that an engine does not wait with, next to the step of an optimizer that the engine prepares.

        An Accelerator waits with those that it prepares, unless step_scheduler_with_optimizer=False; Fabric knows of none.
        """
        event, engine = trace[index], scaling_accelerator(script) or scaling_fabric(script)
        values = script.outline.values(event.subject, event.function)
        created = [v for v in values if isinstance(v, ast.Call) and last_name_of(v.func) != "prepare"]
        names = [last_name_of(call.func) for call in created]
        if engine is None or not event.loops or not names or not all(map(_CREATES_SCHEDULE.search, names)):
            return None
        prepared = prepared_for(script, engine.library, event)
        is_prepared = last_name(event.subject) in prepared.names and engine.library == ACCELERATE
        if _asks_engine(script) or not (_steps_apart(engine) if is_prepared else prepared.is_complete):
            return None
        # Functions of other files may return a schedule that steps once per epoch, or waits itself; one that is prepared is torch's.
        if not is_prepared and not all(map(SCHEDULES.search, names)):
            return None
        steps = [e for e in trace[:index] if e.kind == "opt_step" and last_name(e.optimizer) in prepared.names]
        steps = [e for e in steps if e.loops == event.loops and compatible(e, event)]
        if not any(self._in_each_pass(script, _without_alternatives(trace, event), e) for e in steps):
            return None
        advance = f"`{event.local.subject}.step()` also runs when `{engine.key}` skips the optimizer step"
        if engine.library != ACCELERATE:
            return self.finding(
                script.where(event.node),
                f"in 16-mixed, {advance}",
                instead="compare the scale of the precision plugin before and after the step, and advance only if it did not decrease",
            )
        if is_prepared:
            reason, instead = "step_scheduler_with_optimizer=False", "leave step_scheduler_with_optimizer=False out"
        else:
            reason = f"it was not passed to `{engine.key}.prepare`"
            instead = "prepare the scheduler, which then counts the steps of all processes"
        return self.finding(
            script.where(event.node),
            f"in fp16, {advance}: {reason}",
            instead=f"call it only if not {engine.key}.optimizer_step_was_skipped, or {instead}",
        )

    @staticmethod
    def _counts(script: Script, event: Event) -> bool:
        """Whether a schedule counts iterations; one with a metric, as of ReduceLROnPlateau, or with an epoch does not."""
        call = event.node
        if not isinstance(call, ast.Call) or (isinstance(call.func, ast.Attribute) and call.func.attr == "step_update"):
            return True
        values = arguments_of(call)
        if len(values) > 1:  # `step(i, metric=loss)`
            values = [*call.args, *(k.value for k in call.keywords if k.arg not in _METRICS)]
        if len(values) != 1:
            return not values
        return bool(_ITERATION.search(key_of(values[0]))) or is_position(script, event, values[0])

    @staticmethod
    def _in_each_pass(script: Script, event: Event, step: Event) -> bool:
        """Whether a schedule advances wherever a step may be skipped, if only at the end of an accumulation window."""
        waits = [g for g in step.guards if g not in event.guards and not (is_amp(g) or is_setting(script, g, step))]
        windows = {number for g in step.guards for number in _MODULO.findall(g.text)}
        same = [g for g in event.guards if windows.intersection(_MODULO.findall(g.text))]  # one window, written twice
        same += [g for g in event.guards if PHASE.match(g.text) or _is_per_step(script, g, event)]
        same += [g for g in event.guards if g.is_true and _OF_EPOCH.match(g.text)]
        same += [g for g in event.guards if _TESTED_LOSS.fullmatch(g.text)]  # gradients overflow at a finite loss
        same += [g for g in event.guards if _records_step(script, g, event, step) or _is_start(script, g, event)]
        if tests_norm(script, dataclasses.replace(step, guards=tuple(waits))):
            waits = [g for g in waits if not _FINITE.search(g.text)]  # the script itself skips the step
        guards = tuple(g for g in event.guards if g in step.guards or g not in same)
        return only_settings(script, dataclasses.replace(event, guards=guards), step) and all(
            is_accumulation(g) or _is_flag(script, g, step) or _DATA.search(g.text) or _TESTED_LOSS.fullmatch(g.text)
            for g in waits
        )


def _skippable(script: Script, steps: list[tuple[Trace, Event]], event: Event | None = None) -> list[Event]:
    """The steps that a scaler may skip, neither in bfloat16 (HS120) nor without mixed precision.

    A step after a test of the gradients is not skipped, unless a schedule that does not wait for the test is passed.
    """
    idle = {s.key.rsplit(".", 1)[-1] for s in ScalerWithBf16.idle(script)}
    steps = [(trace, e) for trace, e in steps if e.scaler.rsplit(".", 1)[-1] not in idle]
    others = [e for trace, e in steps if not switched_off(script, e) and not _is_remainder(trace, e)]
    others = [e for e in others if not never_float16(script, e)]
    is_waiting = event is None or tests_norm(script, event)
    others = [e for e in others if not (is_waiting and tests_norm(script, e))]
    # An attribute that no method sets skips nothing (HS132); a variable may be one that a fragment does not show.
    missing = {e.local.scaler for e in unbound_scalers(script)} if others else set()
    return [e for e in others if e.local.scaler not in missing or e.local.scaler.isidentifier()]


def _is_disabled(script: Script, step: Event) -> bool:
    """Whether the flag of a step's scaler compares a variable with a text that it never is: `dtype == "float16"` of `"bfloat16"`."""
    for scaler in scalers_at(script, step):
        flag = argument(scaler.node, None, "enabled")
        test = flag if isinstance(flag, ast.Compare) and isinstance(flag.ops[0], ast.Eq) else None
        values = script.outline.values(key_of(test.left), scaler.function) if test is not None else []
        texts = [constant(value) for value in values]
        if test is not None and texts and all(isinstance(t, str) and t != constant(test.comparators[0]) for t in texts):
            return True
    return False


def _steps_apart(engine: Engine) -> bool:
    """Whether an Accelerator advances the schedules that it prepares without looking at the optimizers."""
    return engine.call is not None and constant(argument(engine.call, None, "step_scheduler_with_optimizer")) is False


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


def _records_step(script: Script, guard: Guard, event: Event, step: Event) -> bool:
    """Whether a condition is a flag that is True after a step, also a skipped one: `stepped = True` next to `scaler.step(optimizer)`.

    Also under the same name in the caller of the function that steps and returns it.
    """
    key, outline = guard.text.partition("#")[0], script.outline
    bound = [b for b in outline.bindings.get(key, ()) if b.function is step.function]
    if event.function is not step.function:
        returned = [b.value for b in outline.bindings.get(key, ()) if b.function is event.function]
        calls = [value for value in returned if isinstance(value, ast.Call)]
        targets = [outline.call_target(call, event.function) for call in calls]
        if len(calls) != len(returned) or any(target is not step.function for target in targets):
            return False
    flags = [constant(b.value) if b.value is not None else None for b in bound]
    chosen = [b.node for b, flag in zip(bound, flags, strict=True) if flag is True]
    if not guard.is_true or not chosen or any(flag not in {True, False} for flag in flags):
        return False
    around, line = set(script.above(step.node)), getattr(step.node, "lineno", 0)
    return all(outline.parents.get(node) in around and getattr(node, "lineno", 0) > line for node in chosen)


def _is_per_step(script: Script, guard: Guard, event: Event) -> bool:
    """Whether a condition is a setting, named for stepping per batch, that nothing assigns where the schedule advances."""
    key = guard.text.partition("#")[0]
    bound = [b for b in script.outline.bindings.get(key, ()) if b.function is event.function]
    loops = [n for n in script.above(event.node) if isinstance(n, (ast.For, ast.AsyncFor, ast.While))]
    before = loops[-1].lineno if loops else 0  # what precedes the loops of a function is set once
    is_set = all(isinstance(b.function.node, ast.Module) or getattr(b.node, "lineno", 0) < before for b in bound)
    return guard.is_true and bool(_PER_STEP.match(key)) and is_set


def _is_start(script: Script, guard: Guard, event: Event) -> bool:
    """Whether a condition is that a loop is in its first iterations, `i < warmup and epoch == 0`, in which most steps are skipped."""
    try:
        test = ast.parse(guard.text.partition("#")[0], mode="eval").body
    except SyntaxError:  # `except@12`
        return False
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    counted = [part for part in parts if _is_below(script, part, event)]
    others = [text_of(part) for part in parts if part not in counted]
    are_set = all(_OF_EPOCH.match(text) or is_setting(script, Guard(text, True), event) for text in others)
    return guard.is_true and bool(counted) and are_set and not _FINITE.search(guard.text)


def _is_below(script: Script, test: ast.expr, event: Event) -> bool:
    """Whether a test is that the number of an iteration is below a limit."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], (ast.Lt, ast.LtE)):
        return False
    return bool(_ITERATION.search(key_of(test.left))) or is_position(script, event, test.left)


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


RULES: tuple[type[Rule], ...] = (SchedulerIgnoresSkips,)
