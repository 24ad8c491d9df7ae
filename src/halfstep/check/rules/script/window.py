"""HS106-HS108: calls of the scaler that belong once per accumulation window."""

from __future__ import annotations

import ast
import re

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.script.flow.conditions import leaves_block
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import (
    TraceRule,
    between,
    earlier,
    implied,
    later,
    loops_around,
    repeats,
    together,
    without_amp,
)
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import targets_of, window_of
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


class UpdateBeforeStep(TraceRule):
    """The scale is updated between a backward and the step that uses its gradients."""

    code = "HS108"
    name = "update-before-step"
    severity = "error"
    reason = (
        "`step` divides by the current scale. After an `update()` that may differ from the scale the loss was multiplied by, so "
        "gradients are off by a factor of two. With one optimizer, `update()` before `step()` raises because no inf check was "
        "recorded. Call `update()` once, after all steps."
    )
    bad = (
        _START.replace(" / accumulate", "") + "    scaler.update()\n    scaler.step(optimizer)\n",
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    scaler.scale(loss_g).backward()\n"
        "    scaler.scale(loss_d).backward()\n    scaler.step(opt_g)\n    scaler.update()\n    scaler.step(opt_d)\n    scaler.update()\n",
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    scaler.scale(model(x)).backward()\n"
        "    for optimizer in optimizers:\n        scaler.step(optimizer)\n        scaler.update()\n",
    )
    good = (
        _START.replace(" / accumulate", "") + "    scaler.step(optimizer)\n    scaler.update()\n",
        _TWO,
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    scaler.scale(loss_d).backward()\n"
        "    scaler.step(opt_d)\n    scaler.update()\n    scaler.scale(loss_g).backward()\n    scaler.step(opt_g)\n    scaler.update()\n",
    )
    references = (f"{_DOCS}#working-with-multiple-models-losses-and-optimizers",)
    kinds = ("update",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An update followed by a step with no new backward in between."""
        event = trace[index]
        if (line := self._loop_over_optimizers(script, trace, index)) is not None:
            return self.finding(
                script.where(event.node),
                f"`{event.local.scaler}.update()` runs after the step of each optimizer in the loop at line {line}: the next one divides "
                "by a different scale than the loss was multiplied by",
                instead=f"call {event.local.scaler}.update() once, after that loop",
            )
        following = next(
            later(trace, index, "backward", "owned_backward", "scale", "scaler_step", "autograd_grad"), None
        )
        if following is None or trace[following].kind != "scaler_step":
            return None
        step = trace[following]
        if step.loops != event.loops or step.scaler != event.scaler or not repeats(event):
            return None
        backs = [
            i for i in earlier(trace, index, "backward") if trace[i].scaled == "yes" and trace[i].scaler == event.scaler
        ]
        if not backs or trace[backs[0]].loops[: len(event.loops)] != event.loops:
            return None
        used = between(trace, backs[-1], index, "scaler_step", "unscale", "update")
        if any(e.optimizer == step.optimizer and e.kind == "scaler_step" for e in used) or without_amp(step):
            return None
        if not (implied(event, step) or implied(step, event) or together(script, event, step)):
            return None
        if _leaves_before(script, event, step):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.scaler}.update()` runs before `{event.scaler}.step({step.optimizer})`: the step divides by a different scale "
            "than the loss was multiplied by",
            instead=f"call {event.scaler}.update() once, after the last step of the iteration",
        )

    @staticmethod
    def _loop_over_optimizers(script: Script, trace: Trace, index: int) -> int | None:
        """The line of a loop that steps several optimizers with this scaler and contains the update but no backward."""
        event, loops = trace[index], loops_around(script, trace[index])
        if not loops or len(loops) != len(event.loops):
            return None
        targets = targets_of(loops[-1])
        inside = [e for e in trace if e.loops[: len(event.loops)] == event.loops]
        steps = [e for e in inside if e.kind == "scaler_step" and e.scaler == event.scaler and e.loops == event.loops]
        if any(e.kind in {"backward", "owned_backward", "scale", "autograd_grad", "handed"} for e in inside):
            return None
        # `if index != chosen: continue` steps one of them; `% optimizer.interval` may end the windows of several at once.
        tests = [re.sub(r"% \w+\.\w+ == 0", "", g.text) for g in event.guards]
        names = {word for text in (event.local.scaler, *tests) for word in re.findall(r"\w+", text)}
        if names & targets or not any(set(re.findall(r"\w+", e.local.optimizer)) & targets for e in steps):
            return None
        backs = [
            i for i in earlier(trace, index, "backward") if trace[i].scaled == "yes" and trace[i].scaler == event.scaler
        ]
        if not any(e.kind in {"backward", "owned_backward"} for e in trace):
            # A method that only steps: another one of the class computes the gradients of all of them.
            scaled = (e for e in script.near(event, "backward") if e.scaled == "yes" and e.scaler == event.scaler)
            return loops[-1].lineno if any(True for _ in scaled) else None
        before = event.loops[:-1]
        return loops[-1].lineno if backs and trace[backs[0]].loops[: len(before)] == before else None


def _leaves_before(script: Script, event: Event, other: Event) -> bool:
    """Whether a branch or a handler around an event goes to the next iteration, so that another event outside of it does not follow."""
    node: ast.AST = event.node
    for parent in script.above(event.node):
        blocks = [parent.body] if isinstance(parent, (ast.If, ast.ExceptHandler)) else []
        for block in [*blocks, parent.orelse] if isinstance(parent, ast.If) else blocks:
            is_inside = any(part is other.node for statement in block for part in ast.walk(statement))
            if node in block and leaves_block(block) and not is_inside:
                return True
        if isinstance(parent, (ast.For, ast.While)):
            return False
        node = parent
    return False


RULES: tuple[type[Rule], ...] = (UnscaleEveryMicroBatch, UpdateEveryMicroBatch, UpdateBeforeStep)
