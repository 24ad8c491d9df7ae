"""HS112, HS157: an iteration that is skipped between `unscale_` or `backward` and `update`."""

from __future__ import annotations

import ast
from typing import NamedTuple

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import TraceRule, switched_off, without_amp
from halfstep.check.script.flow.skipped import find_branch, find_early_return, find_skip, is_past, reads_gradients
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.engines import ACCELERATE, Engine, engine_at, scaling_accelerator
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_LOOP = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        {skip}
    scaler.step(optimizer)
    scaler.update()
"""
_FLAG = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    skip = not torch.isfinite(norm)
    if not skip:
        scaler.step(optimizer)
{update}
"""
_METHODS = """\
import torch

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def train_step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x, y)
        self.scaler.scale(loss).backward()
        if not torch.isfinite(self.clip()):
            {skip}
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def fit(self, loader):
        for x, y in loader:
            self.train_step(x, y)
"""
_OWNED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    accelerator.backward(loss)
{early}    if not {test}:
        continue
    optimizer.step()
"""
_OWNED_NORM = "    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)\n"


class SkipWithoutUpdate(TraceRule):
    """An iteration is skipped after `unscale_` and before `update`, so the next `unscale_` raises."""

    code = "HS112"
    name = "skip-without-update"
    severity = "error"
    reason = (
        "Only `update()` resets the record of `unscale_`. A loop that unscales, detects a non-finite gradient and moves to the next batch "
        "by `continue` or `return` raises RuntimeError there: unscale_() has already been called on this optimizer since the last "
        "update(). The scale does not shrink either, so the overflow would repeat. `scaler.step` skips such steps itself."
    )
    bad = (
        _LOOP.format(skip="continue"),
        _LOOP.format(skip="optimizer.zero_grad()\n        continue"),
        _METHODS.format(skip="return None"),
        _FLAG.format(update="        scaler.update()"),
        _OWNED.format(early=_OWNED_NORM, test="torch.isfinite(norm)"),
    )
    good = (
        _LOOP.format(skip="scaler.update()\n        continue"),
        _LOOP.format(skip="skipped += 1"),
        _METHODS.format(skip="self.scaler.update()\n            return None"),
        _FLAG.format(update="    scaler.update()"),
        _OWNED.format(early=_OWNED_NORM, test="torch.isfinite(norm)").replace(
            "        continue", "        skipped += 1"
        ),
    )
    references = ("https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler.unscale_",)
    words = ("Accelerator",)
    kinds = ("unscale", "owned_clip")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An unscale_ after which a test of the gradients leaves the iteration before any update."""
        event = trace[index]
        if event.kind == "owned_clip":
            return self._owned(script, trace, index)
        if without_amp(event) or switched_off(script, event):
            return None
        updates = [
            e for e in trace if e.kind in {"update", "handed"} and e.scaler == event.scaler and compatible(e, event)
        ]
        # The test is in the function of the `unscale_`, or in one of its callers.
        for depth in range(len(event.roots), -1, -1) if updates else ():
            skip = find_skip(script, event, depth, is_any=True)
            if skip is not None and all(is_past(script, e, event, depth, skip) for e in updates):
                return self.finding(
                    script.where(event.node),
                    f"{script.at(skip.body[-1])} skips `{event.scaler}.update()` after this `unscale_`: the next `unscale_` raises RuntimeError",
                    instead=f"call {event.scaler}.update() before {script.at(skip.body[-1])}, or let {event.scaler}.step skip",
                )
            test = find_branch(script, event, depth, updates)
            if test is not None:
                return self.finding(
                    script.where(event.node),
                    f"`{event.local.scaler}.update()` runs in only one branch of the test at {script.at(test)}: after a skipped "
                    "step the next `unscale_` raises RuntimeError",
                    instead=f"call {event.local.scaler}.update() in every iteration, after that test",
                )
        return None

    def _owned(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The same for Accelerate: its clip unscales, and only the prepared optimizer's step updates the scaler."""
        skip = _owned_skip(script, trace, index)
        if skip is None:
            return None
        owner = skip.owner
        condition = "" if owner.precision == "fp16" else "with mixed_precision='fp16' "
        return self.finding(
            script.where(trace[index].node),
            f"{skip.place} skips the step that updates the scaler of `{owner.key}` after this clip has unscaled the "
            f"gradients: {condition}the next clip raises RuntimeError",
            instead=f"remove the test: the prepared optimizer skips such a step itself ({owner.key}.optimizer_step_was_skipped)",
            severity=None if owner.precision == "fp16" else "warning",
        )


class _Skip(NamedTuple):
    """An Accelerator that scales, and a test of the gradients that leaves out every later clip and step."""

    owner: Engine
    test: ast.If
    place: str  # what skips them, in words


def _owned_skip(script: Script, trace: Trace, index: int) -> _Skip | None:
    """The test of the gradients after an event of an Accelerator that scales the loss."""
    event = trace[index]
    engine = engine_at(script, event.subject if event.kind == "owned_backward" else _owner(event), event.function)
    owner = scaling_accelerator(script)
    if owner is None or engine is None or engine.library != ACCELERATE or not event.loops:
        return None
    # A model that FSDP has wrapped clips itself, in a branch without the clip of the Accelerator, and unscales nothing.
    others = [e for e in trace[index + 1 :] if e.kind == "clip" and compatible(e, event) and e.loops == event.loops]
    for start in (event, *(others if event.kind == "owned_backward" else ())):
        later = [e for e in trace[trace.index(start) + 1 :] if compatible(e, start) and e.loops[:1] == event.loops[:1]]
        uses = [e for e in later if e.kind in {"owned_clip", "opt_step", "handed"}]
        if not any(e.kind == "opt_step" for e in uses) or any(e.kind == "handed" for e in uses):
            continue
        skip = _skip_after(script, start, uses, owner)
        # Before the scaler has looked for inf, only a test of the gradients keeps the scale as it is.
        if skip is not None and (event.kind == "owned_clip" or reads_gradients(script, skip.test)):
            return skip
    return None


def _skip_after(script: Script, start: Event, uses: list[Event], owner: Engine) -> _Skip | None:
    """A test after an event that skips the uses of the scaler, or of which only one branch has them."""
    for depth in range(len(start.roots), -1, -1):
        skip = find_skip(script, start, depth)
        if skip is not None and all(is_past(script, e, start, depth, skip) for e in uses):
            return _Skip(owner, skip, script.at(skip.body[-1]))
        branch = find_branch(script, start, depth, uses)
        if branch is not None:
            return _Skip(owner, branch, f"one branch of the test at {script.at(branch)}")
    return None


def _owner(event: Event) -> str:
    func = event.node.func if isinstance(event.node, ast.Call) else None
    return key_of(func.value) if isinstance(func, ast.Attribute) else ""


_GRADIENTS = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    if any(not torch.isfinite(p.grad).all() for p in model.parameters()):
        {skip}
    scaler.step(optimizer)
    scaler.update()
"""


class OverflowKeepsScale(TraceRule):
    """An iteration with non-finite gradients skips `scaler.step` and `update`, so the scale never shrinks."""

    code = "HS157"
    name = "overflow-keeps-scale"
    severity = "warning"
    reason = (
        "The scale starts at 65536 and shrinks only in `update()`, after `step` or `unscale_` has found inf in the gradients. A loop that "
        "tests the gradients itself and moves to the next batch leaves the scale as it is, and the next batch overflows as well: every "
        "iteration is skipped, the loss stays where it is, and nothing raises. `scaler.step` skips such steps itself."
    )
    bad = (
        _GRADIENTS.format(skip="continue"),
        _GRADIENTS.format(skip="print('overflow')\n        optimizer.zero_grad()\n        continue"),
        _OWNED.format(early="", test="all(torch.isfinite(p.grad).all() for p in model.parameters())"),
    )
    good = (
        _GRADIENTS.format(skip="skipped += 1"),
        _GRADIENTS.format(skip="scaler.update(scaler.get_scale() / 2)\n        continue"),
        _GRADIENTS.format(skip="raise FloatingPointError"),
        _OWNED.format(early="", test="torch.isfinite(loss)"),
    )
    references = ("https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler.update",)
    words = ("Accelerator",)
    kinds = ("backward", "owned_backward")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A scaled backward after which a test of the gradients leaves the iteration before any step and update."""
        event = trace[index]
        if event.kind == "owned_backward":
            return self._owned(script, trace, index)
        if event.scaled != "yes" or without_amp(event) or switched_off(script, event) or not event.loops:
            return None
        later = [e for e in trace[index + 1 :] if compatible(e, event) and e.loops[:1] == event.loops[:1]]
        # With a scaler for each optimizer, the others say nothing about this one.
        own = [e for e in later if e.scaler == event.scaler or e.kind == "handed"]
        uses = [e for e in own if e.kind in {"unscale", "scaler_step", "update", "handed"}]
        updates = [e for e in uses if e.kind == "update"]
        depths = range(len(event.roots), -1, -1) if updates and all(e.kind != "handed" for e in uses) else ()
        skips = [(d, skip) for d in depths if (skip := find_skip(script, event, d)) is not None]
        past = [skip for d, skip in skips if all(is_past(script, e, event, d, skip) for e in uses)]
        skip = next((skip for skip in past if reads_gradients(script, skip)), None)
        if skip is None and depths and (test := find_early_return(script, event, uses)) is not None:
            skip = test if reads_gradients(script, test) else None
        if skip is None:
            return self._in_branch(script, event, uses, updates) if depths and not skips else None
        name = updates[0].local.scaler
        return self.finding(
            script.where(skip.test),
            f"{script.at(skip.body[-1])} skips `{name}.step` and `{name}.update()` when the gradients overflow: the scale does not shrink, "
            "and the next batch overflows as well",
            instead=f"remove the test: {name}.step skips such a step, and {name}.update() lowers the scale",
        )

    def _owned(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The same for Accelerate, whose scaler looks for inf in the step of a prepared optimizer."""
        skip = _owned_skip(script, trace, index)
        if skip is None:
            return None
        owner = skip.owner
        condition = "" if owner.precision == "fp16" else "with mixed_precision='fp16', "
        return self.finding(
            script.where(skip.test),
            f"{condition}{skip.place} skips the step of the prepared optimizer when the gradients overflow: the scale of "
            f"`{owner.key}` does not shrink, and the next batch overflows as well",
            instead=f"remove the test: the prepared optimizer skips such a step and lowers the scale ({owner.key}.optimizer_step_was_skipped)",
        )

    def _in_branch(self, script: Script, event: Event, uses: list[Event], updates: list[Event]) -> Finding | None:
        """The finding for `if isfinite(norm):` around every use of the scaler after the backward."""
        depths = range(len(event.roots), -1, -1)
        branch = next((b for d in depths if (b := find_branch(script, event, d, uses)) is not None), None)
        if branch is None or not reads_gradients(script, branch):
            return None
        name = updates[0].local.scaler
        return self.finding(
            script.where(branch.test),
            f"where the gradients overflow, neither `{name}.step` nor `{name}.update()` runs: the scale does not shrink, and the next batch "
            "overflows as well",
            instead=f"remove the test: {name}.step skips such a step, and {name}.update() lowers the scale",
        )


RULES: tuple[type[Rule], ...] = (SkipWithoutUpdate, OverflowKeepsScale)
