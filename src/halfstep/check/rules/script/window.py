"""HS105-HS107: calls of the scaler that belong once per accumulation window."""

from __future__ import annotations

import ast

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import (
    TraceRule,
    earlier,
    is_amp,
    only_settings,
    rebound_between,
    without_amp,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import window_of
from halfstep.check.script.objects.engines import scaling_accelerator
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import is_one, key_of, last_name

__all__ = ["RULES"]

_OWNED = ("owned_clip", "owned_unscale")  # by a framework
_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_START = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y) / accumulate
    scaler.scale(loss).backward()
"""
_RIGHT = (
    _START
    + """\
    if (i + 1) % accumulate == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
)
_TWO = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    scaler.scale(loss_g).backward()
    scaler.scale(loss_d).backward()
    scaler.unscale_(opt_g)
    scaler.step(opt_g)
    scaler.step(opt_d)
    scaler.update()
"""


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


class DoubleUnscale(TraceRule):
    """The gradients of one optimizer are unscaled twice, or after its step."""

    code = "HS105"
    name = "double-unscale"
    severity = "error"
    reason = (
        "`unscale_` divides the gradients in place and may run once per `update()`. A second call, or a call after `step`, "
        "raises RuntimeError: unscale_() has already been called on this optimizer since the last update(). In fp16 every "
        "`accelerator.clip_grad_norm_` unscales the gradients of all prepared optimizers, so a second one before the step raises too, "
        "and so does one after `accelerator.unscale_gradients()`. After `accelerator.scaler.unscale_(optimizer)` nothing raises, because "
        "the scaler does not know the prepared optimizer: the gradients are divided by the scale twice."
    )
    bad = (
        _START.replace(" / accumulate", "")
        + "    scaler.unscale_(optimizer)\n    log(model)\n    scaler.unscale_(optimizer)\n    scaler.step(optimizer)\n    scaler.update()\n",
        _START.replace(" / accumulate", "")
        + "    scaler.step(optimizer)\n    scaler.unscale_(optimizer)\n    scaler.update()\n",
        _CLIPPED.format(
            parts="unet.parameters(), 1.0)\n    accelerator.clip_grad_norm_(text_encoder.parameters(), 1.0"
        ),
        _CLIPPED.format(parts="unet.parameters(), 1.0").replace(
            "    accelerator.clip", "    accelerator.scaler.unscale_(optimizer)\n    accelerator.clip"
        ),
    )
    good = (
        _START.replace(" / accumulate", "")
        + "    scaler.unscale_(optimizer)\n    log(model)\n    scaler.step(optimizer)\n    scaler.update()\n",
        _RIGHT,
        _TWO,
        _CLIPPED.format(parts="[*unet.parameters(), *text_encoder.parameters()], 1.0"),
    )
    references = (
        _DOCS,
        "https://github.com/huggingface/accelerate/issues/641",
        "measured: source code of accelerate 1.15.0, unscale_gradients and clip_grad_norm_",
    )
    words = ("Accelerator",)
    kinds = ("unscale", *_OWNED)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An unscale_ whose optimizer was unscaled or stepped since the last update."""
        event = trace[index]
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
                extra = next((g for g in before.guards if g not in event.guards and not is_amp(g)), None)
                when = f" if {'' if extra.is_true else 'not '}`{extra.text}`" if extra else ""
                optimizer = event.local.optimizer
                return self.finding(
                    script.where(event.node),
                    f"the gradients of `{optimizer}` were {state} since the last update(){when}: this raises RuntimeError",
                    instead=f"call {event.local.scaler}.unscale_({optimizer}) once, between backward and step",
                    severity="warning" if extra else None,
                )
        return None

    def _by_accelerator(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A second unscaling before the step, one of them by `accelerator.clip_grad_norm_`, which unscales every optimizer."""
        event = trace[index]
        engine = scaling_accelerator(script)
        before = next(earlier(trace, index, "unscale", *_OWNED, "opt_step", "owned_backward", "zero_grad"), None)
        first = trace[before] if before is not None else event
        if engine is None or first.kind not in {"unscale", *_OWNED} or "owned_clip" not in {first.kind, event.kind}:
            return None
        owners = {_owner(e) for e in (first, event)}
        if len(owners) > 1 or last_name(owners.pop()) != engine.name or first.node is event.node:
            return None
        if first.loops != event.loops or not only_settings(script, first, event):
            return None
        when = "" if engine.precision == "fp16" else "in fp16 "
        is_by_hand = "unscale" in {first.kind, event.kind}
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


def _owner(event: Event) -> str:
    """`accelerator` of `accelerator.clip_grad_norm_(...)` and of `accelerator.scaler.unscale_(...)`."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    owner = key_of(func.value) if isinstance(func, ast.Attribute) else ""
    return owner.removesuffix(".scaler") if event.kind == "unscale" else owner


def _unscaled(event: Event) -> str:
    """Whose gradients a call unscales."""
    values = arguments_of(event.node) if isinstance(event.node, ast.Call) and event.kind != "owned_clip" else []
    return f"`{text_of(values[0])}`" if values else "every optimizer"


class UnscaleEveryMicroBatch(TraceRule):
    """Gradients are unscaled on every micro-batch instead of once per accumulation window."""

    code = "HS106"
    name = "unscale-every-micro-batch"
    severity = "error"
    reason = (
        "`unscale_` may be called once between two updates, so it raises RuntimeError on the second micro-batch. If `update()` "
        "also runs each time, unscaled gradients are added to scaled ones that are larger by the scale, which starts at 65536."
    )
    bad = (
        _START
        + "    scaler.unscale_(optimizer)\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        + "    if (i + 1) % accumulate == 0:\n        scaler.step(optimizer)\n        scaler.update()\n        optimizer.zero_grad()\n",
    )
    good = (_RIGHT,)
    references = (f"{_DOCS}#gradient-accumulation", "https://github.com/microsoft/Swin-Transformer/issues/311")
    kinds = ("unscale",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An unscale_ in every iteration of a loop that does not step in every iteration."""
        event = trace[index]
        window = window_of(script, trace, index)
        if window is None or without_amp(event):
            return None
        scaler = event.local.scaler
        return self.finding(
            script.where(event.node),
            f"`{scaler}.unscale_` runs on every micro-batch, but the step of line {window.line(script)} runs only when "
            f"{window.ends}: the second call raises RuntimeError",
            instead="move unscale_ (and clipping) into the condition of the step",
        )


class UpdateEveryMicroBatch(TraceRule):
    """The scaler is updated on every micro-batch instead of once per accumulation window."""

    code = "HS107"
    name = "update-every-micro-batch"
    severity = "error"
    reason = (
        "`update()` on a micro-batch without a step raises AssertionError: No inf checks were recorded prior to update. "
        "If it did change the scale, gradients with different scales would be added up in one window."
    )
    bad = (
        _START
        + "    if (i + 1) % accumulate == 0:\n        scaler.step(optimizer)\n        optimizer.zero_grad()\n    scaler.update()\n",
    )
    good = (
        _START
        + "    if (i + 1) % accumulate == 0:\n        scaler.step(optimizer)\n        optimizer.zero_grad()\n        scaler.update()\n",
        _RIGHT,
    )
    references = (f"{_DOCS}#gradient-accumulation",)
    kinds = ("update",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An update in every iteration of a loop that does not step in every iteration."""
        event = trace[index]
        window = window_of(script, trace, index)
        if window is None or without_amp(event):
            return None
        unscales = [e for e in trace if e.kind == "unscale" and e.loops == event.loops]
        if not all(any(g not in event.guards for g in e.accumulating) for e in unscales):
            return None  # an unscale_ each time records an inf check; HS106 reports it
        return self.finding(
            script.where(event.node),
            f"`{event.local.scaler}.update()` runs on every micro-batch, but the step of line {window.line(script)} runs only when "
            f"{window.ends}: update() without a step raises AssertionError",
            instead="move update() into the condition of the step",
        )


RULES: tuple[type[Rule], ...] = (DoubleUnscale, UnscaleEveryMicroBatch, UpdateEveryMicroBatch)
