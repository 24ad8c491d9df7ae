"""HS176: a scaler that is None on one of the paths that use it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.event import Event, Guard
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.order import is_amp, is_setting
from halfstep.check.script.objects.values import Scaler, constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_TRAIN = """\
import torch

def train(cfg, model, optimizer, loader, scaler):
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16, enabled=cfg.amp):
            loss = loss_fn(model(x), y) / cfg.steps
        if cfg.amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if (i + 1) % cfg.steps == 0:
{update}
            optimizer.zero_grad()

scaler = torch.amp.GradScaler("cuda") if cfg.amp else None
train(cfg, model, optimizer, loader, scaler)
"""
_ALWAYS = "            scaler.step(optimizer)\n            scaler.update()"
_GUARDED = (
    "            if cfg.amp:\n                scaler.step(optimizer)\n                scaler.update()\n"
    "            else:\n                optimizer.step()"
)
_USES = ("scaler_step", "update", "unscale", "scale")


class ScalerMayBeNone(ScriptRule):
    """A scaler that is None without mixed precision is used on a path without it."""

    code = "HS176"
    name = "scaler-may-be-none"
    severity = "error"
    reason = (
        "The scaler is created only with mixed precision and is None otherwise, which other lines of the loop test for. The line does "
        "not: without mixed precision it raises AttributeError: 'NoneType' object has no attribute 'step'. A scaler created with "
        "`enabled=use_amp` needs no such tests, because a disabled one passes every call through."
    )
    bad = (
        _TRAIN.format(update=_ALWAYS),
        _TRAIN.format(update=_ALWAYS).replace(
            'scaler = torch.amp.GradScaler("cuda") if cfg.amp else None\n',
            'scaler = None\nif cfg.amp:\n    scaler = torch.amp.GradScaler("cuda")\n',
        ),
    )
    good = (
        _TRAIN.format(update=_GUARDED),
        _TRAIN.format(update=_ALWAYS).replace('"cuda") if cfg.amp else None', '"cuda", enabled=cfg.amp)'),
    )
    references = ("https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Uses without a test, in a function that tests elsewhere, of a scaler that is None unless a flag is set."""
        for scaler in script.scalers:
            flag = _creation_flag(script, scaler)
            if flag is None:
                continue
            last = scaler.key.rsplit(".", 1)[-1]
            uses = [e for e in script.events(*_USES) if e.scaler.rsplit(".", 1)[-1] == last]
            tested = {e.function for e in uses if flag in e.guards or any(_is_scaler(g, last) for g in e.guards)}
            bare = [e for e in uses if e.function in tested and _is_bare(script, e, flag, last)]
            first = min(bare, key=lambda e: getattr(e.node, "lineno", 0), default=None)
            if first is not None:
                name = first.local.scaler
                state = "is false" if flag.is_true else "is true"
                yield self.finding(
                    script.where(first.node),
                    f"`{name}` is None when `{flag.text}` {state} ({script.at(scaler.node)}), and this line does not test it",
                    instead=f"GradScaler(..., enabled={flag.text if flag.is_true else f'not {flag.text}'}) in both cases, "
                    "or test it here as well",
                )


def _creation_flag(script: Script, scaler: Scaler) -> Guard | None:
    """The one condition under which a scaler is created, where it is None otherwise."""
    parent = script.outline.parents.get(scaler.node)
    if isinstance(parent, ast.IfExp) and parent.body is scaler.node:
        text = key_of(parent.test)
        return Guard(text, is_true=True) if text and constant(parent.orelse) is None else None
    bindings = script.outline.lookup(scaler.key, scaler.function)
    others = [b for b in bindings if b.value is not scaler.node]
    if not others or not all(b.index is None and b.value is not None and constant(b.value) is None for b in others):
        return None
    guards = {g for e in script.events("make_scaler") if e.node is scaler.node for g in e.guards}
    return guards.pop() if len(guards) == 1 and all(g.text.replace(".", "").isidentifier() for g in guards) else None


def _is_scaler(guard: Guard, last: str) -> bool:
    """Whether a condition is that there is a scaler."""
    return guard.is_true and guard.text.rsplit(".", 1)[-1] == last


def _is_bare(script: Script, event: Event, flag: Guard, last: str) -> bool:
    """Whether an event also runs where the flag is off: no condition excludes it, or may do so under another name."""
    others = [g for g in event.guards if g != flag]
    if flag in event.guards or not possible(event.guards, (flag.opposite,)):
        return False
    if any(is_amp(g) or last in g.text for g in others):
        return False
    # A condition that varies within a run is not the flag; any other may imply it.
    return not any(is_setting(script, g, event) and _may_imply(script, g, flag) for g in others)


def _may_imply(script: Script, guard: Guard, flag: Guard) -> bool:
    """Whether a setting may be computed from the flag: a variable whose value names it, or one that is not known."""
    last = flag.text.rsplit(".", 1)[-1]
    values = [b.value for b in script.outline.bindings.get(guard.text, ())]
    return any(value is None or last in ast.unparse(value) for value in values)


RULES: tuple[type[Rule], ...] = (ScalerMayBeNone,)
