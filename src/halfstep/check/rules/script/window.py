"""HS106-HS107: calls of the scaler that belong once per accumulation window."""

from __future__ import annotations

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.script.flow.order import (
    TraceRule,
    without_amp,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import window_of
from halfstep.check.script.script import Script

__all__ = ["RULES"]

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


RULES: tuple[type[Rule], ...] = (UnscaleEveryMicroBatch, UpdateEveryMicroBatch)
