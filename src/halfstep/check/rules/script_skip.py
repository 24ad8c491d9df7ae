"""HS112: a step that is skipped by hand, and what the scaler still remembers of it."""

from __future__ import annotations

import ast
import re

from halfstep.check.event import Event, compatible
from halfstep.check.finding import Finding
from halfstep.check.order import TraceRule, switched_off, without_amp
from halfstep.check.rule import Rule
from halfstep.check.script import Script
from halfstep.check.trace import Trace
from halfstep.check.values import text_of

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
_FINITE = re.compile(r"finite|isnan|isinf", re.IGNORECASE)


class SkipWithoutUpdate(TraceRule):
    """An iteration is given up after `unscale_` and before `update`, so the next `unscale_` raises."""

    code = "HS112"
    name = "skip-without-update"
    severity = "error"
    reason = (
        "`unscale_` is remembered until `update()`. A loop that unscales, finds a gradient that is not finite and goes on to the next "
        "batch by `continue` meets RuntimeError there: unscale_() has already been called on this optimizer since the last "
        "update(). Nor does the scale ever shrink, which is what would end the overflows. `scaler.step` skips such a step by itself."
    )
    bad = (_LOOP.format(skip="continue"), _LOOP.format(skip="optimizer.zero_grad()\n        continue"))
    good = (_LOOP.format(skip="scaler.update()\n        continue"), _LOOP.format(skip="skipped += 1"))
    references = ("https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler.unscale_",)
    kinds = ("unscale",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An unscale after which a test of the gradients leaves the iteration, past every update."""
        event = trace[index]
        if not event.loops or without_amp(event) or switched_off(script, event):
            return None
        skip = self._skip(script, event)
        if skip is None:
            return None
        inside = range(skip.body[0].lineno, (skip.body[-1].end_lineno or 0) + 1)
        updates = [
            e for e in trace if e.kind in {"update", "handed"} and e.scaler == event.scaler and compatible(e, event)
        ]
        if not updates or any(getattr(e.node, "lineno", 0) in inside or not _after(e, skip) for e in updates):
            return None
        return self.finding(
            script.where(event.node),
            f"line {skip.body[-1].lineno} goes on to the next batch without `{event.scaler}.update()`: the next `unscale_` raises",
            instead=f"call {event.scaler}.update() before `continue`, or leave the skipping to {event.scaler}.step",
        )

    @staticmethod
    def _skip(script: Script, event: Event) -> ast.If | None:
        """The test of the gradients, after the event in the same block, whose branch ends in `continue`."""
        statement = script.statement(event.node)
        parent = script.outline.parents.get(statement) if statement is not None else None
        block = next((b for b in _blocks(parent) if statement in b), [])
        for following in block[block.index(statement) + 1 :] if statement in block else ():
            if isinstance(following, ast.If) and _FINITE.search(text_of(following.test)):
                calls = [n for n in ast.walk(following) if isinstance(n, ast.Call) and "update" in text_of(n.func)]
                if isinstance(following.body[-1], ast.Continue) and not calls:
                    return following
        return None


def _blocks(node: ast.AST | None) -> list[list[ast.stmt]]:
    return [b for name in ("body", "orelse", "finalbody") if isinstance(b := getattr(node, name, None), list)]


def _after(event: Event, skip: ast.If) -> bool:
    return getattr(event.node, "lineno", 0) > skip.lineno


RULES: tuple[type[Rule], ...] = (SkipWithoutUpdate,)
