"""HS181: gradients that are cleared on every micro-batch of a window."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

from halfstep.check.examples import ACCUMULATING_LOOP
from halfstep.check.finding import Finding, Severity
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.accumulated import divided_by_parameter, is_counted_between, is_length, may_use_gradients
from halfstep.check.script.flow.divisions import MAX_ASSIGNMENTS, Divisions, assignments_before, divided_by, latent
from halfstep.check.script.flow.event import Event, Guard, compatible
from halfstep.check.script.flow.order import (
    STEPS,
    TraceRule,
    between,
    earlier,
    implied,
    later,
    loops_around,
    only_settings,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import (
    ACCUMULATION,
    Window,
    accumulated_over,
    alternatives,
    branched,
    depth_without_optimizers,
    is_trial,
    last_of_window,
    length_of,
    targets_of,
    window_of_flag,
)
from halfstep.check.script.objects.engines import ACCELERATE, engine_at
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"
_RIGHT = ACCUMULATING_LOOP.format(start="", divide=" / accumulation_steps", end="        optimizer.zero_grad()\n")
_PREPARED = """\
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
"""
_ACCELERATE = (
    _PREPARED
    + """\
{start}{indent}    accelerator.backward(loss_fn(model(x), y))
{indent}    optimizer.step()
{indent}    optimizer.zero_grad()
"""
)
_INSIDE = """\
    with accelerator.accumulate(model):
{start}        accelerator.backward(loss_fn(model(x), y))
        optimizer.step()
{end}"""
_GIVEN_UP = """\
        try:
            x = augment(x)
        except ValueError:
            optimizer.zero_grad()
            continue
"""
_BACKWARDS = ("backward", "owned_backward")
_UPDATES = {"update_grad", "need_update"}  # whether the step follows the backward
_MODEL = regex(r"(^|[._])(model|net|network)(_\w+)?$|(^|\.)\w+_(model|net)$")
# What waits for the end of a window; with DeepSpeed the engine behind the Accelerator does.
_SYNCHRONISES = {"accumulate", "no_sync", "_do_sync", "trigger_sync_in_backward", "deepspeed_plugin"}


class ClearedEveryMicroBatch(TraceRule):
    """Gradients are cleared on every micro-batch, so nothing accumulates."""

    code = "HS181"
    name = "cleared-every-micro-batch"
    severity = "warning"
    reason = (
        "With `zero_grad()` in every iteration and a step in every n-th, the step uses the gradients of the last micro-batch only: "
        "n - 1 of n backward passes are wasted. A step in every iteration is no better if the loss is divided by n, by the script or "
        "by an Accelerator with gradient_accumulation_steps whose `accumulate()` is not used: nothing accumulates, and the gradients "
        "are n times too small. Inside `accumulate()` the optimizer of Accelerate clears only on the last micro-batch of a window: "
        "before the backward, that discards all the earlier ones. A flag that holds the step back, `if not self.accumulate:`, is a window too. "
        "It is advice where the script sets n to 1."
    )
    bad = (
        ACCUMULATING_LOOP.format(start="    optimizer.zero_grad()\n", divide=" / accumulation_steps", end=""),
        _ACCELERATE.format(start="", indent=""),
        _PREPARED + _INSIDE.format(start="        optimizer.zero_grad()\n", end=""),
    )
    good = (
        _RIGHT,
        _ACCELERATE.format(start="    with accelerator.accumulate(model):\n", indent="    "),
        _PREPARED + _INSIDE.format(start="", end="        optimizer.zero_grad()\n"),
        _PREPARED + _INSIDE.format(start=_GIVEN_UP, end="        optimizer.zero_grad()\n"),
    )
    references = (_DOCS, "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation")
    words = ("Accelerator", "accelerator.backward")
    kinds = ("zero_grad",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A zero_grad in the iteration of every backward, in a loop that steps in every n-th."""
        event = trace[index]
        if any(guard.text.startswith("except@") for guard in event.guards):
            return None  # a step that failed is given up
        if (last := last_of_window(trace, index)) is not None and self._clears(
            trace, index, index, Window(last[1], "")
        ):
            return self._discards(script, event, *last)
        windows = ((back, accumulated_over(script, trace, back)) for back in self._backwards(script, trace, index))
        # Around an inner loop, of the chunks of a batch, the window is over the iterations of the loop that clears.
        windows = (
            (b, w)
            for b, w in windows
            if trace[b].loops == event.loops or (w and w.step.loops == event.loops and not w.by_loop)
        )
        window = next((w for back, w in windows if w is not None and self._clears(trace, index, back, w)), None)
        window = window or self._owned_window(script, trace, index) or self._discarding_loop(script, trace, index)
        if not script.outline.calls.get("accumulate"):
            window = window or window_of_flag(script, trace, index)
        if window is None:
            return (
                self._before_sync(script, trace, index)
                or self._at_end(script, trace, index)
                or self._steps_always(script, trace, index)
                or self._on_each_call(script, trace, index)
            )
        if window.guard in event.guards:
            return None  # cleared at the end of the window
        steps = {e.optimizer for e in trace if e.kind in STEPS and e.loops == window.step.loops}
        if len(steps) > 1 and not ACCUMULATION.search(f"{window.length} {window.ends}"):
            return None  # a generator that is updated in every n-th iteration
        return self.finding(
            script.where(event.node),
            f"`{_cleared(event)}` runs on every micro-batch, but the step of line {window.line(script)} runs only when {window.ends}: "
            f"the earlier gradients are discarded{(when := latent(script, window.length, event.function))}",
            instead="clear the gradients right after the step",
            severity="advice" if when else None,
        )

    @staticmethod
    def _backwards(script: Script, trace: Trace, index: int) -> Iterator[int]:
        """The backwards, one per branch, whose gradients are cleared in their own iteration, before them or after the step."""
        event = trace[index]
        before = [i for i in earlier(trace, index, *STEPS, *_BACKWARDS) if trace[i].loops == event.loops]
        backs = [i for i in before if trace[i].kind in _BACKWARDS]
        steps = [trace[i] for i in before if trace[i].kind in STEPS]
        if event.optimizer and steps and all(e.optimizer not in {event.optimizer, ""} for e in steps):
            before = []  # of a discriminator, which is trained before the generator in each iteration
        if before:
            # After the step; without one in between the gradients of this very backward are discarded, which has other reasons.
            backs = backs if alternatives([trace[i] for i in backs]) and before[0] != backs[0] else []
        else:
            following = list(later(trace, index, *_BACKWARDS))
            backs = [i for i in following if i == following[0] or not compatible(trace[i], trace[following[0]])]
        for back in backs:
            depth = len(event.loops) if event.loops and not before else None
            if event.loops != trace[back].loops[:depth] or not implied(event, trace[back]):
                continue
            is_model = _MODEL.search(event.local.optimizer)
            if trace[back].kind == "owned_backward" and script.outline.calls.get("accumulate") and not is_model:
                continue  # the optimizers of Accelerate clear gradients only at the end of a window there
            ends = set(branched(trace, trace[back]))
            # What is cleared at the start of an iteration is cleared before its backward, whatever that depends on.
            guards = trace[back].guards if before else trace[back].accumulating
            if only_settings(script, replace(trace[back], guards=tuple(set(guards) - ends)), event):
                yield back

    @staticmethod
    def _owned_window(script: Script, trace: Trace, index: int) -> Window | None:
        """The window of timm's scaler, which also runs backward: `scaler(loss, optimizer, update_grad=(i + 1) % n == 0)`."""
        event = trace[index]
        for step in trace:
            if step.kind != "owned_step" or step.loops != event.loops or not implied(event, step):
                continue
            passed = (
                [k.value for k in step.node.keywords if k.arg in _UPDATES] if isinstance(step.node, ast.Call) else []
            )
            for value in passed:
                options = [value, *script.outline.values(key_of(value), step.function)]
                ends = next((text_of(v) for v in options if isinstance(v, ast.Compare) and "%" in text_of(v)), "")
                if ends:
                    return Window(step, f"`{ends}`")
        return None

    @staticmethod
    def _clears(trace: Trace, index: int, back: int, window: Window) -> bool:
        """Whether a zero_grad clears the gradients that the step of a window uses."""
        name = trace[index].optimizer
        models = {e.subject for e in trace[:back] if e.kind == "forward" and e.loops == trace[back].loops}
        if not name or name == window.step.optimizer or name in models:
            return True
        optimizers = {e.optimizer for e in trace if e.kind in STEPS}
        return len(optimizers) == 1 and bool(_MODEL.search(name))

    @staticmethod
    def _discarding_loop(script: Script, trace: Trace, index: int) -> Window | None:
        """The window of a loop over samples that clears before each backward, with the only step after the loop."""
        event = trace[index]
        back, step = (next(later(trace, index, *kinds), None) for kinds in (_BACKWARDS, STEPS))
        loops = loops_around(script, event)
        if back is None or step is None or step < back or not loops or len(loops) != len(event.loops):
            return None
        after, loop = trace[step], loops[-1]
        if trace[back].loops != event.loops or after.loops != event.loops[:-1] or not implied(event, trace[back]):
            return None
        is_same = event.optimizer == after.optimizer or _MODEL.search(event.optimizer)
        if not is_same or not isinstance(loop, ast.For) or not only_settings(script, after, event):
            return None
        if set(re.findall(r"\w+", event.local.optimizer)) & targets_of(loop) or may_use_gradients(loop):
            return None
        if any(e.loops == event.loops for e in trace if e.kind in {*STEPS, "handed", "grad_read", "autograd_grad"}):
            return None
        return Window(after, f"the loop at line {script.where(loop).line} ends", by_loop=True)

    def _before_sync(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a zero_grad before the backward in the body of `accelerator.accumulate`."""
        event = trace[index]
        contexts = [region.node for region in event.regions]
        accumulate = next(
            (c for c in contexts if isinstance(c, ast.Call) and text_of(c.func).endswith(".accumulate")), None
        )
        if accumulate is None or not isinstance(accumulate.func, ast.Attribute):
            return None
        if any("%" in guard.text for guard in event.accumulating):
            return None  # at the start of a window
        stepped = (trace[i] for i in earlier(trace, index, "opt_step") if trace[i].optimizer == event.optimizer)
        if any(region.node is accumulate for step in stepped for region in step.regions):
            return None  # of the loss before: it clears what this step has used
        engine = engine_at(script, key_of(accumulate.func.value), event.function)
        if engine is None or engine.library != ACCELERATE or engine.plugin == "deepspeed":
            return None
        if engine.is_created and (engine.steps is None or constant(engine.steps) in {1, None}):
            return None  # every micro-batch is a window, unless the launcher says otherwise
        depth = depth_without_optimizers(script, event)
        inside = [
            i
            for i in later(trace, index, "owned_backward", "opt_step")
            if trace[i].loops[:depth] == event.loops[:depth] and any(r.node is accumulate for r in trace[i].regions)
        ]
        back = next((i for i in inside if trace[i].kind == "owned_backward"), None)
        is_looped = depth < len(event.loops)
        steps = [
            i
            for i in inside
            if trace[i].kind == "opt_step" and (is_looped or trace[i].optimizer in {event.optimizer, ""})
        ]
        if back is None or not steps or steps[0] < back:
            return None
        number = text_of(engine.steps) or "gradient_accumulation_steps"  # of a file that creates the Accelerator
        condition = "" if isinstance(constant(engine.steps), int) else f"if `{number}` is above 1, "
        return self.finding(
            script.where(event.node),
            f"{condition}`{_cleared(event)}` before the backward discards what `{text_of(accumulate.func)}` has accumulated: Accelerate "
            "runs it on the last micro-batch of a window",
            instead="clear the gradients after the step",
        )

    def _at_end(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a zero_grad in the iteration that ends a window, before its backward and step."""
        event = trace[index]
        if (last := last_of_window(trace, index)) is not None and self._clears(
            trace, index, index, Window(last[1], "")
        ):
            return self._discards(script, event, *last)
        following = [i for i in later(trace, index, *_BACKWARDS, *STEPS) if trace[i].loops == event.loops]
        back = following[0] if following and event.accumulating and event.loops else 0
        if not back or trace[back].kind not in _BACKWARDS:
            return None
        steps = [trace[i] for i in itertools.takewhile(lambda i: trace[i].kind in STEPS, following[1:])]
        step = next((e for e in steps if self._clears(trace, index, back, Window(e, ""))), None)
        before = [trace[i] for i in earlier(trace, index, *STEPS) if trace[i].loops == event.loops]
        if step is None or step.kind == "owned_step" or any(e.optimizer == step.optimizer for e in before):
            return None  # after a step, it clears what that step has used
        ends = [g for g in event.accumulating if g in step.guards and g not in trace[back].guards]
        guard = next((g for g in ends if g.is_true and length_of(script, g)), None)
        early, late = (replace(e, guards=tuple(g for g in e.guards if g != guard)) for e in (event, step))
        if (
            guard is None
            or not only_settings(script, early, trace[back])
            or not only_settings(script, late, trace[back])
        ):
            return None
        if between(trace, index, trace.index(step), "grad_read", "handed", "autograd_grad"):
            return None
        if is_counted_between(guard, event, step):
            return None
        return self._discards(script, event, guard, step, "error")

    def _discards(
        self, script: Script, event: Event, guard: Guard, step: Event, severity: Severity | None = None
    ) -> Finding:
        return self.finding(
            script.where(event.node),
            f"`{_cleared(event)}` runs when `{guard.text}`, like the step of line {script.where(step.node).line}, but before the "
            "backward: the gradients of the other micro-batches are discarded",
            instead="clear the gradients right after the step",
            severity=severity,
        )

    def _steps_always(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a step on every micro-batch of a loss that is divided by their number."""
        event = trace[index]
        near = [e for e in trace if e.loops == event.loops and compatible(e, event)]
        steps = [e for e in near if e.kind in {"opt_step", "scaler_step"}]
        backs = [e for e in near if e.kind in _BACKWARDS]
        # Several losses of one micro-batch, as of real and generated images, each divided by the number of micro-batches.
        is_one = bool(backs) and (alternatives(backs) or all(self._divisor(script, back) for back in backs))
        if not event.loops or not steps or not is_one or is_trial(script, event):
            return None
        steps = [e for e in steps if compatible(e, backs[0])] or steps
        if not all(only_settings(script, e, backs[0]) for e in (event, *steps)) or script.has("owned_step"):
            return None
        ends = [g for g in steps[0].accumulating if g in backs[0].guards]
        if any(is_counted_between(g, backs[0], steps[0]) for g in ends):
            return None  # the backward of a window's start, the step of its end
        opposites = {g.opposite for g in steps[0].accumulating}
        others = [e for e in trace if e.kind in _BACKWARDS and e.loops[: len(event.loops)] == event.loops]
        if any(opposites & set(e.guards) or (e.loops != event.loops and compatible(e, backs[0])) for e in others):
            return None  # the other micro-batches have a backward of their own, under no_sync() or in a loop
        divisor = self._divisor(script, backs[0])
        if not divisor:
            return None
        line = script.where(steps[0].node).line
        return self.finding(
            script.where(event.node),
            f"{divisor}, but the step of line {line} and `{_cleared(event)}` run on every micro-batch: nothing accumulates, and "
            "the gradients are too small by that factor",
            instead="step and clear only at the end of a window"
            if backs[0].kind == "backward" or "accumulation_steps `" not in divisor
            else f"with {backs[0].local.subject}.accumulate(model): around forward, backward, step and zero_grad",
        )

    def _on_each_call(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a function that clears before its backward, of a loss that is divided by its parameter for the window."""
        event = trace[index]
        back = next((trace[i] for i in later(trace, index, *_BACKWARDS)), None)
        divisor = divided_by_parameter(script, event, back) if back is not None and implied(event, back) else None
        if divisor is None:
            return None
        return self.finding(
            script.where(event.node),
            f"the loss is divided by `{divisor.name}`, but `{_cleared(event)}` runs on every call of `{event.function.name}`: nothing accumulates",
            instead="clear the gradients after the step",
            severity="advice" if divisor.is_one else None,
        )

    @staticmethod
    def _divisor(script: Script, back: Event) -> str:
        """What divides the loss of a backward by the number of micro-batches, in words; "" if nothing certainly does."""
        engine = engine_at(script, back.local.subject, back.function) if back.kind == "owned_backward" else None
        is_counting = engine is not None and (engine.steps is not None or engine.plugin == "deepspeed")
        if engine is not None and engine.library == ACCELERATE and is_counting:
            if engine.plugin == "deepspeed":
                return ""
            is_set = engine.steps is not None and constant(engine.steps) not in {1, None}
            is_own = not _SYNCHRONISES & (script.outline.calls.keys() | script.outline.loads.keys())
            text = text_of(engine.steps) if engine.steps is not None else ""
            return (
                f"`{engine.key}` divides the loss by its gradient_accumulation_steps `{text}`"
                if is_set and is_own
                else ""
            )
        statement = script.statement(back.node)
        if (back.kind != "backward" and (engine is None or engine.library != ACCELERATE)) or statement is None:
            return ""
        before = list(itertools.islice(assignments_before(script, statement), MAX_ASSIGNMENTS))
        divisors = {d for node in (back.node, *(a.statement for a in before)) for d in divided_by(node)}
        divisors = {d for d in divisors if is_length(d) and not latent(script, d, back.function)}
        length = next((d for d in sorted(divisors) if Divisions(d, before).of(back.node)), "")
        return f"the loss is divided by `{length}`" if length else ""


def _cleared(event: Event) -> str:
    """The call that clears gradients, as the line has it."""
    return f"{event.local.optimizer}.zero_grad()" if isinstance(event.node, ast.Call) else text_of(event.node)


RULES: tuple[type[Rule], ...] = (ClearedEveryMicroBatch,)
