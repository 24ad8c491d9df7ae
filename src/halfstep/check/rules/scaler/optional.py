"""HS176: a scaler that is None on one of the paths that use it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.absent import Absent, absent_scalers
from halfstep.check.script.flow.conditions import holds_without, is_about
from halfstep.check.script.flow.event import Event, Guard
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.order import is_amp, is_setting
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.saved.none_entries import tests_none_entry
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
_AMP_NAME = regex(r"amp(?<![a-z]amp)|fp16|half|mixed|16", re.IGNORECASE)
_CONFIG = regex(r"^(self\.)?([a-z]+_)?(args|opts?|cfg|config|conf|hps?|hparams|flags|settings|params)\b", re.IGNORECASE)
_OFF = regex(r"(^|[._])(no|not|disable|without)_|fp32|float32|full", re.IGNORECASE)
_USES = ("scaler_step", "update", "unscale", "scale", "save_scaler", "load_scaler", "get_scale")


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
        """Uses without a test, of a scaler that is None unless a flag is set: one for each scaler."""
        uses: dict[ast.AST, tuple[Event, Guard]] = {}
        for absent in absent_scalers(script):
            for flag in absent.flags:
                first = min(_untested(script, absent, flag), key=_line, default=None)
                known = uses.get(absent.scaler.node)
                if first is not None and (known is None or _line(first) < _line(known[0])):
                    uses[absent.scaler.node] = (first, flag)
        for node, (event, flag) in uses.items():
            state = "is false" if flag.is_true else "is true"
            yield self.finding(
                script.where(event.node),
                f"`{event.local.scaler}` is None when `{flag.text}` {state} ({script.at(node)}), and this line does not test it",
                instead=f"GradScaler(..., enabled={flag.text if flag.is_true else f'not {flag.text}'}) in both cases, "
                "or test it here as well",
            )


def _line(event: Event) -> int:
    return getattr(event.node, "lineno", 0)


def _untested(script: Script, absent: Absent, flag: Guard) -> list[Event]:
    """The uses of a scaler that run without the flag, in functions that test it elsewhere or where nothing does."""
    names = absent.names
    uses = [e for e in script.events(*_USES) if e.scaler.rsplit(".", 1)[-1] in names and _is_method_call(e)]
    tested = {e.function for e in uses if flag in e.guards or any(_is_scaler(g, names) for g in e.guards)}
    tested |= {e.function for e in uses if any(other in e.guards for other in absent.flags if other != flag)}
    tested |= {f for f in {e.function for e in uses} - tested if _tests(f, names)}
    here = {e for e in absent.trace if e.kind in _USES}
    # Where no line tests it, or where another function does, the flag must be an option that a run may set either way.
    is_open = _is_option(script, flag, absent.scaler.function) and _is_mixed(flag)
    everywhere = is_open and (not tested or absent.is_created)
    return [
        e
        for e in uses
        if e in here
        and (e.function in tested or (everywhere and not _is_amp_only(e, names)))
        and _is_bare(script, e, flag, absent)
    ]


def _is_method_call(event: Event) -> bool:
    """Whether an event calls a method of the scaler, rather than passing it on."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    return isinstance(func, ast.Attribute) and key_of(func.value) == event.local.scaler


def _tests(function: Function, names: frozenset[str]) -> bool:
    """Whether a function compares a scaler with None in a value, as for `enabled=scaler is not None`."""
    asserted = {part for node in ast.walk(function.node) if isinstance(node, ast.Assert) for part in ast.walk(node)}
    compared = [n for n in ast.walk(function.node) if isinstance(n, ast.Compare) and constant(n.comparators[0]) is None]
    own = [n for n in compared if key_of(n.left).rsplit(".", 1)[-1] in names]
    return bool(own) and not asserted.intersection(own)


def _is_mixed(flag: Guard) -> bool:
    """Whether a flag switches mixed precision on, or is one that switches it off."""
    return is_amp(flag) and flag.is_true != bool(_OFF.search(flag.text))


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


def _is_amp_only(event: Event, names: frozenset[str]) -> bool:
    """Whether a function is for mixed precision by its name, or asserts that there is a scaler."""
    asserts = (n for n in ast.walk(event.function.node) if isinstance(n, ast.Assert))
    texts = [text_of(n.test) for n in asserts]
    return bool(_AMP_NAME.search(event.function.name)) or any(name in text for text in texts for name in names)


def _is_scaler(guard: Guard, names: frozenset[str]) -> bool:
    """Whether a condition is that there is a scaler."""
    return guard.is_true and guard.text.rsplit(".", 1)[-1] in names


def _is_bare(script: Script, event: Event, flag: Guard, absent: Absent) -> bool:
    """Whether an event also runs where the flag is off: no condition excludes it, or may do so under another name."""
    names = absent.names
    others = [g for g in event.guards if g not in absent.flags and not tests_none_entry(script, event, g)]
    if flag in event.guards or not possible(event.guards, (flag.opposite,)):
        return False
    doubtful = [g for g in others if is_amp(g) or is_about(g, flag) or any(n in g.text for n in names)]
    if not all(holds_without(script.outline, event.function, g, flag) for g in doubtful):
        return False
    # A condition that varies within a run is not the flag; any other may imply it.
    return not any(is_setting(script, g, event) and _may_imply(script, g, flag) for g in others if not is_amp(g))


def _may_imply(script: Script, guard: Guard, flag: Guard) -> bool:
    """Whether a setting may be computed from the flag: a variable whose value names it, or one that is not known."""
    last = flag.text.rsplit(".", 1)[-1]
    values = [b.value for b in script.outline.bindings.get(guard.text, ())]
    return any(value is None or last in ast.unparse(value) for value in values)


RULES: tuple[type[Rule], ...] = (ScalerMayBeNone,)
