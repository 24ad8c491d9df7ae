"""HS176: a scaler that is None on one of the paths that use it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.conditions import Conditions
from halfstep.check.script.flow.event import Event, Guard
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.order import is_amp, is_setting
from halfstep.check.script.objects.values import Scaler, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

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
_UNTESTED = """\
import torch

use_amp = args.amp and torch.cuda.is_available()
scaler = torch.amp.GradScaler("cuda"{created}
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", enabled=use_amp):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
_AMP_NAME = re.compile(r"amp(?<![a-z]amp)|fp16|half|mixed|16", re.IGNORECASE)
_CONFIG = re.compile(r"^(self\.)?(args|opts?|cfg|config|conf|hp|hparams|flags|settings|params)\b", re.IGNORECASE)
_USES = ("scaler_step", "update", "unscale", "scale")


class ScalerMayBeNone(ScriptRule):
    """A scaler that is None without mixed precision is used on a path without it."""

    code = "HS176"
    name = "scaler-may-be-none"
    severity = "error"
    reason = (
        "The scaler is created only with mixed precision and is None otherwise, and the line does not test for it: "
        "without mixed precision it raises AttributeError: 'NoneType' object has no attribute 'step'. A scaler created with "
        "`enabled=use_amp` needs no such tests, because a disabled one passes every call through."
    )
    bad = (
        _TRAIN.format(update=_ALWAYS),
        _TRAIN.format(update=_ALWAYS).replace(
            'scaler = torch.amp.GradScaler("cuda") if cfg.amp else None\n',
            'scaler = None\nif cfg.amp:\n    scaler = torch.amp.GradScaler("cuda")\n',
        ),
        _UNTESTED.format(created=") if use_amp else None"),
        _UNTESTED.format(created=") if args.amp and device.type == 'cuda' else None"),
        _UNTESTED.format(created=") if dtype == 'float16' else None").replace("args.amp and torch", "torch"),
    )
    good = (
        _TRAIN.format(update=_GUARDED),
        _TRAIN.format(update=_ALWAYS).replace('"cuda") if cfg.amp else None', '"cuda", enabled=cfg.amp)'),
        _UNTESTED.format(created=", enabled=use_amp)"),
        _UNTESTED.format(created=") if use_amp else None").replace("args.amp and torch.cuda.is_available()", "True"),
        _UNTESTED.format(created=") if torch.cuda.is_available() else None"),
        _UNTESTED.format(created=") if use_amp else None").replace("for x", "assert scaler is not None\nfor x"),
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
            # Where no line tests it, the flag must be an option that a run may set either way.
            everywhere = not tested and _is_option(script, flag, scaler.function) and _is_mixed(flag)
            bare = [
                e
                for e in uses
                if (e.function in tested or (everywhere and not _is_amp_only(e, last)))
                and _is_bare(script, e, flag, last)
            ]
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
        if constant(parent.orelse) is not None:
            return None
        # `args.amp and device == "cuda"`: without the option the scaler is None, whatever the device.
        parts = Conditions(script.outline, scaler.function).guards(parent.test, is_true=True)
        plain = Guard(key_of(parent.test), is_true=True)
        return plain if plain.text else next(filter(_is_mixed, parts), None)
    bindings = script.outline.lookup(scaler.key, scaler.function)
    others = [b for b in bindings if b.value is not scaler.node]
    if not others or not all(b.index is None and b.value is not None and constant(b.value) is None for b in others):
        return None
    guards = {g for e in script.events("make_scaler") if e.node is scaler.node for g in e.guards}
    return guards.pop() if len(guards) == 1 and all(g.text.replace(".", "").isidentifier() for g in guards) else None


def _is_mixed(flag: Guard) -> bool:
    """Whether a flag switches mixed precision on."""
    return flag.is_true and is_amp(flag)


def _is_option(script: Script, flag: Guard, function: Function) -> bool:
    """Whether the file does not fix a flag: no literal is assigned to it, or used as the default of the parameter."""
    key = flag.text.partition(" ")[0]  # of `dtype == "float16"`
    if _CONFIG.search(key):
        return True
    values = script.outline.values(key, function)
    if key != flag.text:
        return len(values) != 1 or constant(values[0]) is ...
    return bool(values) and all(constant(value) is ... and _reads_option(value) for value in values)


def _reads_option(value: ast.expr) -> bool:
    """Whether a value contains an attribute or an entry of something: `args.amp`, `cfg["amp"]`, `cfg.get("amp", True)`."""
    return any(isinstance(n, (ast.Attribute, ast.Subscript)) and _CONFIG.search(text_of(n)) for n in ast.walk(value))


def _is_amp_only(event: Event, last: str) -> bool:
    """Whether a function is for mixed precision by its name, or asserts that there is a scaler."""
    asserts = (n for n in ast.walk(event.function.node) if isinstance(n, ast.Assert))
    return bool(_AMP_NAME.search(event.function.name)) or any(last in text_of(n.test) for n in asserts)


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
