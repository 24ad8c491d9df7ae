"""HS115: an update or a step that finds no gradients checked."""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import replace

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.flow.conditions import leaves_block
from halfstep.check.script.flow.constant_loss import constant_loss
from halfstep.check.script.flow.event import Event, Guard, compatible, is_accumulation
from halfstep.check.script.flow.order import (
    TraceRule,
    implied,
    is_amp,
    is_setting,
    loops_around,
    switched_off,
    without_amp,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.updates import is_passed_in
from halfstep.check.script.flow.window import depth_without_optimizers
from halfstep.check.script.objects.owners import optimized_models
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.handlers import LOOPS, caught_block, raised_past
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_BATCH = regex(
    r"step|batch|iter(?!ator)|^optimi[sz]e_parameters$", re.IGNORECASE
)  # functions that a caller in another file runs once per batch
_USES = ("scale", "unscale", "scaler_step", "handed", "stored", "get_scale")
_STEPS = regex(r"step|unscale|optimi[sz]e|update_(param|weight|model)|apply|learn", re.IGNORECASE)
_OPTIMIZER = regex(r"(^|[._])opt(im|s?\b|_)", re.IGNORECASE)
_WORD = regex(r"[A-Za-z_]\w+")
_SETTINGS = regex(r"\b(args|cfg|config|conf|hparams|opts?|self)\.")  # two settings of one object are two variables
_START = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
"""
_SKIPPING = _START + "    scaler.scale(loss).backward()\n    norm = measure(model)\n{step}"
_LOSS = _START + "{backward}"
_BOTH = "    scaler.step(optimizer)\n    scaler.update()\n"
_ACCUMULATING = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y) / steps
    scaler.scale(loss).backward()
    if (i + 1) % steps == 0:
        if torch.isfinite(loss):
            scaler.step(optimizer)
{update}scaler.update()
        optimizer.zero_grad()
"""


class UncheckedUpdate(TraceRule):
    """A scaler is updated, or steps, on a path on which no gradients were checked for inf."""

    code = "HS115"
    name = "unchecked-update"
    severity = "error"
    reason = (
        "`unscale_` and `step` check the gradients for inf and NaN, and `update` needs the result of at least one such check since the "
        "last `update`. Where a test skips the step but not the update, it raises AssertionError: No inf checks were recorded prior to "
        "update. Where a test skips the backward, all gradients are None after `zero_grad()`, and `step` raises AssertionError: No inf "
        "checks were recorded for this optimizer. The run stops at the first batch that is skipped, often hours after its start."
    )
    bad = (
        _SKIPPING.format(step="    if torch.isfinite(norm):\n        scaler.step(optimizer)\n    scaler.update()\n"),
        _SKIPPING.format(step="    if not torch.isfinite(norm):\n        scaler.update()\n        continue\n" + _BOTH),
        _LOSS.format(
            backward="    if torch.isfinite(loss):\n        scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
        ),
        _LOSS.format(
            backward="    if torch.isnan(loss) or torch.isinf(loss):\n        scaler.update()\n        continue\n"
            "    scaler.scale(loss).backward()\n    if (i + 1) % steps == 0:\n        scaler.step(optimizer)\n        scaler.update()\n"
        ).replace("for x, y in loader:\n    optimizer.zero_grad()", "for i, (x, y) in enumerate(loader):"),
        _ACCUMULATING.format(update="        "),
    )
    good = (
        _SKIPPING.format(
            step="    if torch.isfinite(norm):\n        scaler.step(optimizer)\n        scaler.update()\n"
        ),
        _SKIPPING.format(step="    if not torch.isfinite(norm):\n        continue\n" + _BOTH),
        _LOSS.format(
            backward="    if torch.isfinite(loss):\n        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()\n"
        ),
        _ACCUMULATING.format(update="            "),
    )
    references = ("https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler.update",)
    kinds = ("update", "scaler_step")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An update without a check since the last one, or a step without a backward, for some value of a condition."""
        event = trace[index]
        is_repeated = bool(event.loops) or (not event.roots and bool(_BATCH.search(event.function.name)))
        if not is_repeated or _has_arguments(event) or switched_off(script, event):
            return None
        caught = replace(event, guards=tuple(g for g in event.guards if not g.text.startswith("except@")))
        if not (script.scalers_named(event.scaler) or is_passed_in(script, trace, event)) or without_amp(caught):
            return None
        loops = event.loops[: depth_without_optimizers(script, event)]
        around = [e for e in trace if (loops or not event.loops) and e.loops[: len(loops)] == loops]
        usual = [e for e in around if not any(guard.text.startswith("except@") for guard in e.guards)]
        if any(e.kind in {"handed", "owned_step", "owned_backward", "make_scaler"} for e in usual):
            return None
        if len(caught.guards) < len(event.guards) or (event.kind == "update" and _guarded_block(script, event)):
            return self._update_after_exception(script, event, around) if event.kind == "update" else None
        if event.kind == "update":
            return self._unchecked_update(script, event, around)
        return (
            self._constant_loss(script, event, around)
            or self._step_without_gradients(script, event, around)
            or self._step_after_exception(script, event, around)
        )

    def _constant_loss(self, script: Script, event: Event, around: list[Event]) -> Finding | None:
        """The finding for a step after the backward of a loss that, under a condition, no parameter has a part in."""
        before = list(itertools.takewhile(lambda e: e is not event, around))
        cleared = [e for e in before if e.kind == "zero_grad" and e.optimizer == event.optimizer and implied(e, event)]
        if not cleared or cleared[-1].accumulating or _keeps_zeros(cleared[-1]):
            return None
        backs = [e for e in before[before.index(cleared[-1]) :] if e.kind == "backward" and compatible(e, event)]
        if len(backs) != 1 or event.accumulating or (choice := constant_loss(script, backs[0])) is None:
            return None
        return self.finding(
            script.where(event.node),
            f"where `{text_of(choice.test)}` decides for it, the loss of {script.at(choice.value)} is no result of the model: its backward leaves every gradient None "
            f"after zero_grad(), and `{event.local.scaler}.step` raises AssertionError",
            instead="skip backward, step and update of that batch, or add 0 * output.sum() to the loss",
        )

    def _unchecked_update(self, script: Script, event: Event, around: list[Event]) -> Finding | None:
        """The finding for an update whose steps are all under a condition that the update does not have."""
        checks = [e for e in around if e.kind in {"scaler_step", "unscale"} and e.scaler == event.scaler]
        if not checks:
            return self._never_checked(script, event, around)
        if not any(e.kind == "scaler_step" for e in checks):
            return None
        # The end of a window is a condition of its own, unless the update waits for it as well.
        waits = any(is_accumulation(g) for g in _guards(checks) if g not in event.guards)
        guard = None if waits else _decisive(script, event, checks)
        if guard is None and not any(compatible(e, event) for e in checks):
            # The branch of a skipped batch: whatever was checked before it, another update has used.
            updates = [e for e in around if e.kind == "update" and e.scaler == event.scaler and e is not event]
            if all(_is_used(c, updates) for c in checks):
                tested = [g for g in event.guards if _is_excluded(g, _guards(checks)) and _varies(script, g, event)]
                guard = tested[0].opposite if tested else None
        if guard is None:
            return None
        return self.finding(
            script.where(event.node),
            f"when {_negated(guard)}, no step has checked the gradients since the last update: "
            f"`{event.local.scaler}.update()` raises AssertionError",
            instead=f"call {event.local.scaler}.update() only after {event.local.scaler}.step",
        )

    def _never_checked(self, script: Script, event: Event, around: list[Event]) -> Finding | None:
        """The finding for an update in a loop that scales a loss and has no step of any kind, or of a scaler with no other use."""
        scaled = [e for e in around if e.kind == "backward" and e.scaled == "yes" and e.scaler == event.scaler]
        if not event.loops or any(e.function is not event.function for e in scaled):
            return None
        if not scaled:
            name = event.local.scaler.rsplit(".", 1)[-1]
            used = [e for e in script.events(*_USES) if e.scaler.rsplit(".", 1)[-1] in {name, ""}]
            if used or not any(e.kind == "opt_step" and compatible(e, event) for e in around):
                return None
        other = {e.node for e in around if e.kind == "opt_step" and (not scaled or not compatible(e, event))}
        other |= {e.node for e in script.events("sched_step")}
        # What the function does before its loop, such as creating a schedule for the optimizer, steps nothing.
        loop = next((n for n in script.above(event.node) if isinstance(n, LOOPS)), None)
        called = [n for n in ast.walk(loop or event.function.node) if isinstance(n, ast.Call) and n not in other]
        if scaled and any(map(_may_step, called)):
            return None
        return self.finding(
            script.where(event.node),
            f"no step of `{event.local.scaler}` checks the gradients: `{event.local.scaler}.update()` raises AssertionError",
            instead=f"remove {event.local.scaler}.update(), or call {event.local.scaler}.step(optimizer) before it",
        )

    def _update_after_exception(self, script: Script, event: Event, around: list[Event]) -> Finding | None:
        """The finding for an update in the handler of a block whose own updates use every check that it makes."""
        block = _guarded_block(script, event)
        inside = [e for e in around if any(node in block for node in (*e.roots, e.node))]
        checks = [e for e in around if e.kind in {"scaler_step", "unscale"} and e.scaler == event.scaler]
        is_final = event not in inside and not any(guard.text.startswith("except@") for guard in event.guards)
        updates = [event] if is_final else [e for e in inside if e.kind == "update" and e.scaler == event.scaler]
        first = next((e for e in inside if e.kind in {"forward", "backward", "scaler_step", "unscale"}), None)
        if first is None or first.kind in {"scaler_step", "unscale"} or first.loops != event.loops:
            return None
        if not any(e.kind == "scaler_step" for e in checks) or not all(e in inside for e in checks):
            return None
        if not all(_is_used(c, updates) for c in checks):
            return None
        return self.finding(
            script.where(event.node),
            f"when line {_line(first)} raises, no step has checked the gradients since the last update: "
            f"`{event.local.scaler}.update()` raises AssertionError",
            instead="clear the gradients here, without an update",
        )

    def _step_without_gradients(self, script: Script, event: Event, around: list[Event]) -> Finding | None:
        """The finding for a step whose gradients are cleared on every pass, and computed only under a condition."""
        backs = [e for e in around if e.kind == "backward"]
        cleared = [e for e in around if e.kind == "zero_grad" and not e.accumulating]
        if not backs or any(e.kind == "autograd_grad" for e in around) or _counts_backwards(script, event, backs):
            return None
        uses = backs
        guard = _decisive(script, event, backs)
        if guard is None:
            uses = _calls_of_model(script, event, around)
            guard = _decisive(script, event, uses)
        if guard is None or any(map(is_accumulation, _guards([*uses, event]))):
            return None
        model = uses[0].local.subject if uses is not backs else ""
        if not any(guard not in e.guards and implied(e, event) and not _keeps_zeros(e) for e in cleared):
            return None
        return self.finding(
            script.where(event.node),
            f"when {_negated(guard)}, {f'`{model}` is not called' if model else 'backward is skipped'} and every gradient "
            f"{f'of `{event.local.optimizer}` ' if model else ''}is None after zero_grad(): `{event.local.scaler}.step` raises AssertionError",
            instead="skip the step and the update of that batch as well",
        )

    def _step_after_exception(self, script: Script, event: Event, around: list[Event]) -> Finding | None:
        """The finding for a step whose gradients are cleared on every pass, and whose backward a handled exception skips."""
        cleared = [e for e in around if e.kind == "zero_grad" and implied(e, event) and not _keeps_zeros(e)]
        backs, above = [e for e in around if e.kind == "backward"], set(script.above(event.node))
        if not cleared or any(e.accumulating or e.function is not event.function for e in (event, *cleared, *backs)):
            return None
        if any(e.kind == "autograd_grad" for e in around) or any(_varies(script, g, event) for g in event.guards):
            return None
        attempts = [raised_past(e.node, script.above(e.node), above) for e in backs]
        if not attempts or None in attempts or any(isinstance(n, ast.Try) for n in above):
            return None
        inside = {n for attempt in attempts[:1] if attempt is not None for n in ast.walk(attempt)}
        first = next((e.node for e in around if e.kind in {"forward", "enter_autocast"} and e.node in inside), None)
        if first is None or event.node in inside:
            return None
        return self.finding(
            script.where(event.node),
            f"when {script.at(first)} raises, backward is skipped and every gradient is None after zero_grad(): "
            f"`{event.local.scaler}.step` raises AssertionError",
            instead="skip the step and the update of that batch as well",
        )


def _may_step(call: ast.Call) -> bool:
    """Whether a call may step an optimizer: by its name, or because it receives one."""
    name = text_of(call.func).rsplit(".", 1)[-1]
    values = [key_of(value) for value in (*call.args, *(k.value for k in call.keywords))]
    values = [value for value in values if "param_groups" not in value]  # its learning rate
    return bool(_STEPS.search(name)) or (name != "scale" and any(map(_OPTIMIZER.search, values)))


def _has_arguments(event: Event) -> bool:
    """Whether a call passes more than usual: a closure to an optimizer, a new scale to update."""
    call, usual = event.node, 1 if event.kind == "scaler_step" else 0
    return isinstance(call, ast.Call) and len(call.args) + len(call.keywords) > usual


def _line(event: Event) -> int:
    return int(getattr(event.node, "lineno", 0))


def _guarded_block(script: Script, event: Event) -> set[ast.AST]:
    """The nodes whose RuntimeError the handler around an event catches; none if it may know more, or if an error in it is caught."""
    if any("scaler" in g.text and not g.text.endswith(("scaler", "scaler is None")) for g in event.guards):
        return set()
    return caught_block(event.node, script.above(event.node))


def _calls_of_model(script: Script, event: Event, around: list[Event]) -> list[Event]:
    """The calls of the one model that a step's optimizer updates; none if it is used in any other way in the loop."""
    models, loops = optimized_models(script, event), loops_around(script, event)
    if len(models) != 1 or not loops or event.roots:
        return []
    name = next(iter(models))
    calls = {e.node: e for e in around if e.kind == "forward" and e.subject == name}
    conditions = {guard.text for guard in _guards(list(calls.values()))}
    for node in ast.walk(loops[-1]):
        if key_of(node) != name or not isinstance(node, (ast.Name, ast.Attribute)):
            continue
        parent, statement = script.outline.parents.get(node), script.statement(node)
        is_call = isinstance(parent, ast.Call) and parent.func is node and parent in calls
        is_mode = isinstance(parent, ast.Attribute) and parent.attr in {"train", "eval", "parameters", "zero_grad"}
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if not is_call and not is_mode and not any(key_of(target) in conditions for target in targets):
            return []
    return list(calls.values())


def _is_used(check: Event, updates: list[Event]) -> bool:
    """Whether an update always follows a check: one without further conditions, or two on the two sides of one condition."""
    further = [set(update.guards) - set(check.guards) for update in updates]
    return any(
        not own or any(_is_opposite(guard, other) for guard in own for other in further if len(own) == 1)
        for own in further
    )


def _is_opposite(guard: Guard, others: set[Guard]) -> bool:
    """Whether conditions hold exactly where another does not: neither `a` nor `b`, for `a or b`."""
    parts = guard.text.split(" or ") if guard.is_true else []
    return others == {guard.opposite} or (len(parts) > 1 and others == {Guard(part, False) for part in parts})


def _is_excluded(guard: Guard, others: set[Guard]) -> bool:
    """Whether a condition is false wherever others hold: `a or b` where neither does."""
    parts = guard.text.split(" or ") if guard.is_true else []
    return guard.opposite in others or (len(parts) > 1 and all(Guard(part, False) in others for part in parts))


def _guards(events: list[Event]) -> set[Guard]:
    return {guard for event in events for guard in event.guards}


def _varies(script: Script, guard: Guard, event: Event) -> bool:
    """Whether a condition may be true for one batch and false for the next."""
    return not (is_amp(guard) or is_setting(script, guard, event) or "@" in guard.text)


def _decisive(script: Script, event: Event, others: list[Event]) -> Guard | None:
    """The condition that all other events have and this one does not, if it is not the same for every batch."""
    common = set.intersection(*(set(e.guards) for e in others)) if others else set()
    own = [g for g in others[0].guards if g in common and g not in event.guards] if others else []
    own = [g for g in own if _varies(script, g, others[0]) and not _tests_the_same(event, g)]
    own = [g for g in own if not any(_raises_unless(script, g, other) for other in others)]
    return own[0] if own else None


def _counts_backwards(script: Script, event: Event, backs: list[Event]) -> bool:
    """Whether a condition of a step tests what is assigned next to the backward, or where it is skipped: `if count == 0: continue`."""
    tested = {word for guard in event.guards for word in _WORD.findall(guard.text)}
    for back in backs:
        statement = script.statement(back.node)
        for outer in script.above(statement) if statement is not None else ():
            body = getattr(outer, "body", ())
            block = body if isinstance(body, list) else []
            targets: list[ast.expr] = [n.target for n in block if isinstance(n, ast.AugAssign)]
            # `skipped = True` and `break` above the backward, then `if skipped: continue`
            skips = [n for n in block if isinstance(n, ast.If) and leaves_block(n.body)]
            targets += [t for n in skips for s in n.body if isinstance(s, ast.Assign) for t in s.targets]
            if statement in block:  # further out only counters: `loss = ...` is tested for other reasons
                targets += [target for n in block if isinstance(n, ast.Assign) for target in n.targets]
            if tested & {key_of(target).rsplit(".", 1)[-1] for target in targets}:
                return True
            if isinstance(outer, LOOPS):
                break
    return False


def _raises_unless(script: Script, guard: Guard, event: Event) -> bool:
    """Whether a statement before an event may raise where a condition around the event is not met, so that the run stops."""
    words = set(re.findall(r"[A-Za-z_]\w+", guard.text))
    inner: ast.AST = event.node
    for outer in script.above(event.node):
        for statement in getattr(outer, "body", ()):
            if statement is inner:
                break
            tested = re.findall(r"[A-Za-z_]\w+", text_of(statement.test)) if isinstance(statement, ast.If) else ()
            if words & set(tested) and any(isinstance(node, ast.Raise) for node in ast.walk(statement)):
                return True
        inner = outer
    return False


def _tests_the_same(event: Event, guard: Guard) -> bool:
    """Whether a condition of an event has a variable in common with another condition, which it may imply."""
    words = set(_WORD.findall(_SETTINGS.sub(r"\1_", guard.text))) - {"self", "torch", "math", "np"}
    return any(words & set(_WORD.findall(_SETTINGS.sub(r"\1_", g.text))) for g in event.guards)


def _negated(guard: Guard) -> str:
    return f"`{guard.text}` is {'false' if guard.is_true else 'true'}"


def _keeps_zeros(event: Event) -> bool:
    """Whether gradients are set to zero instead of None."""
    call = event.node
    return isinstance(call, ast.Call) and any(
        k.arg == "set_to_none" and constant(k.value) is False for k in call.keywords
    )


RULES: tuple[type[Rule], ...] = (UncheckedUpdate,)
