"""HS105: gradients that are unscaled twice, by the scaler or by an Accelerator."""

from __future__ import annotations

import ast

from halfstep.check.examples import TWO_OPTIMIZERS
from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import (
    TraceRule,
    earlier,
    is_amp,
    loops_around,
    only_settings,
    rebound_between,
    switched_off,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.updates import updated_since
from halfstep.check.script.flow.window import targets_of
from halfstep.check.script.objects.engines import engine_at, scaling_accelerator
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.owners import have_same
from halfstep.check.script.objects.values import argument, text_of
from halfstep.check.script.scaling.passes import number_of_passes
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import is_one, key_of, last_name

__all__ = ["RULES"]

_PARTS = regex(r"\._?(\w+_)?(optim\w*|opts?)$")  # attributes with the optimizers that another one combines
_OWNED = ("owned_clip", "owned_unscale")  # by a framework
_RENEW = {"owned_backward", "backward", "opt_step", "update", "handed", "zero_grad"}
_WORD = regex(r"\w+")
_START = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y){divide}
    scaler.scale(loss).backward()
"""
_WINDOW = (
    _START.format(divide=" / accumulate")
    + """\
    if (i + 1) % accumulate == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
)
_CLIPPED = """\
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
unet, text_encoder, optimizer, loader = accelerator.prepare(unet, text_encoder, optimizer, loader)
for batch in loader:
    accelerator.backward(loss_fn(unet, text_encoder, batch))
    accelerator.clip_grad_norm_({parts})
    optimizer.step()
    optimizer.zero_grad()
"""


TWO_OPTIMIZERS_CLIPPED = """\
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
a, b, opt_a, opt_b, loader = accelerator.prepare(a, b, opt_a, opt_b, loader)
for x in loader:
    opt_a.zero_grad()
    opt_b.zero_grad()
    accelerator.backward(loss_a(a, b, x))
    accelerator.clip_grad_norm_([*a.parameters(), *b.parameters()], 1.0)
    opt_a.step()
{again}    opt_b.step()
"""


class DoubleUnscale(TraceRule):
    """The gradients of one optimizer are unscaled twice, or after its step."""

    code = "HS105"
    name = "double-unscale"
    severity = "error"
    reason = (
        "`unscale_` divides the gradients in place and may run once per `update()`. A second call, or a call after `step`, "
        "raises RuntimeError: unscale_() has already been called on this optimizer since the last update(). In fp16 every "
        "`accelerator.clip_grad_norm_` unscales the gradients of all prepared optimizers, so a second one before the step raises too, as "
        "in the second pass of a loop over groups or models, and so does one after `accelerator.unscale_gradients()`. After `accelerator.scaler.unscale_(optimizer)` nothing raises, because "
        "the scaler does not know the prepared optimizer: the gradients are divided by the scale twice. Each step of a prepared optimizer "
        "updates the scaler, so the step of the next one unscales again what the clipping has unscaled, and nothing raises either. The "
        "scaler knows optimizers by identity: after `unscale_(combined.optimizers[0])` the step of `combined` unscales as well, and of two "
        "optimizers made from the same parameters the second step divides the gradients again."
    )
    bad = (
        _START.format(divide="")
        + "    scaler.unscale_(optimizer)\n    log(model)\n    scaler.unscale_(optimizer)\n    scaler.step(optimizer)\n    scaler.update()\n",
        _START.format(divide="") + "    scaler.step(optimizer)\n    scaler.unscale_(optimizer)\n    scaler.update()\n",
        _CLIPPED.format(
            parts="unet.parameters(), 1.0)\n    accelerator.clip_grad_norm_(text_encoder.parameters(), 1.0"
        ),
        _CLIPPED.format(parts="unet.parameters(), 1.0").replace(
            "    accelerator.clip", "    accelerator.scaler.unscale_(optimizer)\n    accelerator.clip"
        ),
        TWO_OPTIMIZERS_CLIPPED.format(again=""),
        _CLIPPED.format(parts="part.parameters(), 1.0").replace(
            "    accelerator.clip", "    for part in (unet, text_encoder):\n        accelerator.clip"
        ),
    )
    good = (
        _START.format(divide="")
        + "    scaler.unscale_(optimizer)\n    log(model)\n    scaler.step(optimizer)\n    scaler.update()\n",
        _WINDOW,
        TWO_OPTIMIZERS,
        _CLIPPED.format(parts="[*unet.parameters(), *text_encoder.parameters()], 1.0"),
        TWO_OPTIMIZERS_CLIPPED.format(again="    accelerator.backward(loss_b(a, b, x))\n"),
    )
    references = (
        "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
        "https://github.com/huggingface/accelerate/issues/641",
        "measured: source code of accelerate 1.15.0, unscale_gradients and clip_grad_norm_",
    )
    words = ("Accelerator",)
    kinds = ("unscale", *_OWNED, "opt_step", "scaler_step")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An unscale_ whose optimizer was unscaled or stepped since the last update."""
        event = trace[index]
        if event.kind == "scaler_step":
            return self._of_wrapped(script, trace, index)
        if event.kind in {"owned_clip", "opt_step"} and (again := self._after_step(script, trace, index)) is not None:
            return again
        if event.kind == "opt_step":
            return None
        if event.kind in _OWNED and (finding := self._in_each_pass(script, trace, index)) is not None:
            return finding
        if (finding := self._by_accelerator(script, trace, index)) is not None or event.kind in _OWNED:
            return finding
        if not is_one(event.optimizer):
            return None
        for i in earlier(trace, index, "unscale", "scaler_step", "update", "backward"):
            before = trace[i]
            if before.kind in {"update", "backward"}:
                if before.loops != event.loops if before.kind == "backward" else before.scaler != event.scaler:
                    continue
                return None
            if before.optimizer == event.optimizer and before.scaler == event.scaler and before.loops == event.loops:
                if before.node is event.node or rebound_between(script, before, event):
                    return None
                if not only_settings(script, before, event):
                    return None
                state = "already unscaled" if before.kind == "unscale" else "already used by step()"
                extra = [g for g in dict.fromkeys(before.guards) if g not in event.guards and not is_amp(g)]
                conditions = [f"{'' if g.is_true else 'not '}`{g.text}`" for g in extra]
                when = f" if {' and '.join(conditions)}" if extra else ""
                optimizer = event.local.optimizer
                return self.finding(
                    script.where(event.node),
                    f"the gradients of `{optimizer}` were {state} since the last update(){when}: this raises RuntimeError",
                    instead=f"call {event.local.scaler}.unscale_({optimizer}) once, between backward and step",
                    severity="warning" if extra else None,
                )
        return None

    def _in_each_pass(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An Accelerator's clipping in a loop over groups or models between backward and step: its second pass unscales again."""
        event, loops = trace[index], loops_around(script, trace[index])
        loop = loops[-1] if loops and len(loops) == len(event.loops) else None
        engine = scaling_accelerator(script) if isinstance(loop, ast.For) else None
        if engine is None or not isinstance(loop, ast.For) or last_name(_owner(event)) != engine.name:
            return None
        inside = [e for e in trace if e.loops[: len(event.loops)] == event.loops]
        targets = targets_of(loop)
        tested = {word for guard in event.guards for word in _WORD.findall(guard.text)}
        values = arguments_of(event.node) if isinstance(event.node, ast.Call) else []
        names = {n.id for value in values for n in ast.walk(value) if isinstance(n, ast.Name)}
        is_passed = not values if event.kind == "owned_unscale" else bool(names & targets)  # all of them, or by parts
        leaves = any(isinstance(n, (ast.Break, ast.Return)) for n in ast.walk(loop))
        num = number_of_passes(script, loop.iter, event.function) if is_passed and not targets & tested else 1
        if num == 1 or leaves or any(e.kind in _RENEW for e in inside):
            return None
        when = ("" if num else "with more than one pass, ") + ("" if engine.precision == "fp16" else "in fp16 ")
        return self.finding(
            script.where(event.node),
            f"each pass of the loop at {script.at(loop)} unscales the gradients of every optimizer: {when}the second raises RuntimeError",
            instead=f"{engine.key}.unscale_gradients() before the loop, and torch's clip_grad_norm_ in it",
            severity=None if num and engine.precision == "fp16" else "warning",
        )

    def _of_shared(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a step of an optimizer with the same parameters as the one whose gradients were divided before it."""
        event = trace[index]
        ends = ("update", "backward", "owned_backward", "zero_grad", "handed")
        for i in earlier(trace, index, "unscale", "scaler_step", *ends):
            before = trace[i]
            if before.kind in ends or before.loops != event.loops or before.scaler != event.scaler:
                return None
            if before.optimizer == event.optimizer:
                if before.kind == "unscale":
                    continue
                return None
            if not have_same(script, before, event):
                continue
            if switched_off(script, event) or not only_settings(script, before, event):
                return None
            own, other = event.local.optimizer, before.local.optimizer
            return self.finding(
                script.where(event.node),
                f"`{own}` has the same parameters as `{other}`, whose gradients are divided by the scale at {script.at(before.node)}: "
                "this divides them again",
                instead=f"one optimizer for these parameters, or a backward before each step and zero_grad() after `{other}`'s",
            )
        return None

    def _of_wrapped(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a step of an optimizer that contains those whose gradients were unscaled, or is in one of them."""
        event, own = trace[index], trace[index].local.optimizer
        if (shared := self._of_shared(script, trace, index)) is not None:
            return shared
        for i in earlier(trace, index, "unscale", "scaler_step", "update"):
            before = trace[i]
            if before.kind != "unscale":
                return None
            inner = _inside_of(script, before)
            outer = inner.rpartition(".")[0]
            is_part = bool(outer) and own not in {"", "self"} and own == outer and bool(_PARTS.search(inner))
            if is_part and before.scaler == event.scaler and before.function is event.function:
                if switched_off(script, event) or not only_settings(script, before, event):
                    return None
                return self.finding(
                    script.where(event.node),
                    f"{script.at(before.node)} has unscaled the gradients of `{inner}`, but the scaler does not know `{own}`: this divides "
                    "the same gradients by the scale again",
                    instead=f"{event.local.scaler}.unscale_({own}), or a step for each of its optimizers",
                )
        return None

    def _by_accelerator(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A second unscaling before the step, one of them by `accelerator.clip_grad_norm_`, which unscales every optimizer."""
        event = trace[index]
        before = next(earlier(trace, index, "unscale", *_OWNED, "opt_step", "owned_backward", "zero_grad"), None)
        first = trace[before] if before is not None else event
        if first.kind not in {"unscale", *_OWNED} or "owned_clip" not in {first.kind, event.kind}:
            return None
        is_by_hand = "unscale" in {first.kind, event.kind}
        # A script that asks an Accelerator for its scaler runs in fp16, whichever file creates the Accelerator.
        engine = engine_at(script, _owner(event), event.function) if is_by_hand else scaling_accelerator(script)
        owners = {_owner(e) for e in (first, event)}
        if engine is None or engine.plugin or engine.precision not in {"fp16", "?"} or first.node is event.node:
            return None
        if len(owners) > 1 or last_name(owners.pop()) != engine.name:
            return None
        if first.loops != event.loops or not only_settings(script, first, event) or _is_fallback(script, event):
            return None
        when = "" if engine.precision == "fp16" else "in fp16 "
        effect = "divides them by the scale again" if is_by_hand else "raises RuntimeError"
        instead = (
            f"clip all parameters in one call, or call {engine.key}.unscale_gradients() and torch's clip_grad_norm_"
        )
        return self.finding(
            script.where(event.node),
            f"the call at {script.at(first.node)} has unscaled the gradients of {_unscaled(first)}: {when}this one {effect}",
            instead=f"{engine.key}.clip_grad_norm_ alone: it unscales before it clips" if is_by_hand else instead,
            severity=None if engine.precision == "fp16" or is_by_hand else "warning",
        )

    def _after_step(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A second optimizer of an Accelerator: clipping has unscaled its gradients, and the step of the first has updated the scaler."""
        event, engine = trace[index], scaling_accelerator(script)
        again = updated_since(script, trace, index, engine) if engine is not None else None
        if engine is None or again is None:
            return None
        when = "" if engine.precision == "fp16" else "in fp16 "
        return self.finding(
            script.where(event.node),
            f"{script.at(again.clip.node)} has unscaled the gradients of every optimizer, and `{again.step.local.optimizer}.step()` has "
            f"updated the scaler since: {when}this divides those of `{again.optimizer}` by the scale again",
            instead="one optimizer with two parameter groups, or a backward, a clipping and a step for each",
            severity=None if engine.precision == "fp16" else "warning",
        )


def _is_fallback(script: Script, event: Event) -> bool:
    """Whether a clipping runs only where no other has assigned its norm: `if norm is None: norm = accelerator.clip_grad_norm_(...)`."""
    assignment = script.outline.parents.get(event.node)
    targets = {key_of(t) for t in assignment.targets} if isinstance(assignment, ast.Assign) else set()
    return any(guard.text in targets and not guard.is_true for guard in event.local.guards)


def _inside_of(script: Script, event: Event) -> str:
    """What an unscale_ takes its optimizer from: `combined.optimizers` of `combined.optimizers[0]`, also in a loop over them."""
    value = argument(event.node, 0, "optimizer") if isinstance(event.node, ast.Call) else None
    if isinstance(value, ast.Name):
        loops = [n for n in script.above(event.node) if isinstance(n, ast.For)]
        value = next((loop.iter for loop in loops if text_of(loop.target) == value.id), None)
    while isinstance(value, ast.Subscript):
        value = value.value
    return key_of(value)


def _owner(event: Event) -> str:
    """`accelerator` of `accelerator.clip_grad_norm_(...)` and of `accelerator.scaler.unscale_(...)`."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    owner = key_of(func.value) if isinstance(func, ast.Attribute) else ""
    return owner.removesuffix(".scaler") if event.kind == "unscale" else owner


def _unscaled(event: Event) -> str:
    """Whose gradients a call unscales."""
    values = arguments_of(event.node) if isinstance(event.node, ast.Call) and event.kind != "owned_clip" else []
    return f"`{text_of(values[0])}`" if values else "every optimizer"


RULES: tuple[type[Rule], ...] = (DoubleUnscale,)
