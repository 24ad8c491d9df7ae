"""HS132, HS172, HS173: scalers used before they exist, and states that a resumed run misses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.creation import created_later, created_under, flags_read_early, passed_at, tests_entry
from halfstep.check.script.flow.event import Event, Guard
from halfstep.check.script.flow.unbound import unbound_scalers
from halfstep.check.script.objects.saving import adds_entries, saves
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.saved.apex import checkpoints_without_apex
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_AMP = "https://docs.pytorch.org/docs/stable/amp.html"
_RESUME = """\
import torch
def main():
{first}    checkpoint = torch.load(path)
    optimizer.load_state_dict(checkpoint["optimizer"])
    scaler.load_state_dict(checkpoint["scaler"])
{second}    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({{"optimizer": optimizer.state_dict(){saved}}}, path)
"""
_CREATE = '    scaler = torch.amp.GradScaler("cuda")\n'
_SAVED = ', "scaler": scaler.state_dict()'
_USES = ("scale", "unscale", "scaler_step", "update", "load_scaler", "save_scaler", "backward")


class ScalerBeforeCreation(ScriptRule):
    """A scaler or a precision flag is used before it is created."""

    code = "HS132"
    name = "scaler-before-creation"
    severity = "error"
    reason = (
        "A variable exists only after its assignment: an earlier use raises UnboundLocalError in a function, NameError in a module and "
        "AttributeError for `self.scaler`. It is typical of resuming: the checkpoint is loaded above the line that creates the "
        "scaler, and the mistake shows only when a run is resumed."
    )
    bad = (
        _RESUME.format(first="", second=_CREATE, saved=_SAVED),
        "import torch\nclass Trainer:\n    def __init__(self, path):\n        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "        if path:\n            self.load(path)\n        self.scaler = torch.amp.GradScaler('cuda')\n    def load(self, path):\n"
        "        state = torch.load(path)\n        self.optimizer.load_state_dict(state['optimizer'])\n"
        "        self.scaler.load_state_dict(state['scaler'])\n    def fit(self):\n        for x in loader:\n"
        "            self.scaler.scale(model(x)).backward()\n            self.scaler.step(self.optimizer)\n            self.scaler.update()\n"
        "        torch.save({'optimizer': self.optimizer.state_dict(), 'scaler': self.scaler.state_dict()}, 'x.pt')\n",
    )
    good = (_RESUME.format(first=_CREATE, second="", saved=_SAVED),)
    references = (
        "https://docs.python.org/3/faq/programming.html#why-am-i-getting-an-unboundlocalerror-when-the-variable-has-a-value",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Uses of a scaler in a place that is always reached before any of its assignments, or on a path without any."""
        yield from self._states(script)
        for early in flags_read_early(script):
            yield self.finding(
                script.where(early.node),
                f"`{early.key}` is read here through the call at {script.at(early.call)} before line {early.first} assigns it: AttributeError",
                instead=f"assign `{early.key}` above that call",
            )
        for event in unbound_scalers(script):
            key = event.local.scaler
            error = "AttributeError" if key.startswith("self.") else "NameError"
            yield self.finding(
                script.where(event.node),
                f"`{key}` is used here, and nothing in the file assigns it: {error}",
                instead=f"{key} = torch.amp.GradScaler('cuda')",
            )
        reported: set[tuple[str, ast.AST]] = set()
        conditional: set[str] = set()
        for trace in script.traces:
            for event in trace:
                if event.kind not in _USES or not event.scaler or not isinstance(event.node, ast.Call):
                    continue
                created = created_later(script, event)
                place = (event.scaler, event.roots[0] if event.roots else event.function.node)
                is_open = event.kind != "backward" and event.scaler not in conditional
                setting = created_under(script, trace, event) if is_open else None
                if setting is not None and not _switched_off_without(script, setting, event):
                    conditional.add(event.scaler)
                    yield self._conditional(script, event, setting)
                if created is None or place in reported:
                    continue
                reported.add(place)
                via = f" through the call at {script.at(event.roots[0])}" if event.roots else ""
                yield self.finding(
                    script.where(event.node),
                    f"`{event.scaler}` is used here{via} before it is created at line {created}",
                    instead=f"create `{event.scaler}` above its first use",
                )

    def _states(self, script: Script) -> Iterator[Finding]:
        """States that are read only with mixed precision and put into every checkpoint: `if amp: state = scaler.state_dict()`."""
        for event in {e.node: e for e in script.events("save_scaler")}.values():
            statement = script.statement(event.node)
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            branch = script.outline.parents.get(statement) if statement is not None else None
            if statement is None or not isinstance(target, ast.Name) or not isinstance(branch, ast.If) or branch.orelse:
                continue
            names = [n for n in ast.walk(event.function.node) if isinstance(n, ast.Name) and n.id == target.id]
            used = [n for n in names if isinstance(n.ctx, ast.Load) and n.lineno > (branch.end_lineno or 0)]
            used = [n for n in used if not any(isinstance(p, (ast.If, ast.IfExp, ast.Try)) for p in script.above(n))]
            if used and sum(isinstance(n.ctx, ast.Store) for n in names) == 1:
                yield self.finding(
                    script.where(used[0]),
                    f"`{target.id}` is assigned only if `{text_of(branch.test)}` ({script.at(statement)}), but used here in any case: without it, "
                    f"{'NameError' if event.function is script.outline.module else 'UnboundLocalError'}",
                    instead=f"{target.id} = None above the condition, or a scaler with enabled={text_of(branch.test)}",
                )

    def _conditional(self, script: Script, event: Event, setting: Guard) -> Finding:
        """The finding for a scaler that a setting creates and that is used without it."""
        key = event.scaler
        is_local = event.function is not script.outline.module or bool(event.roots)
        error = "AttributeError" if key.startswith("self.") else "UnboundLocalError" if is_local else "NameError"
        condition = setting.text if setting.is_true else f"not {setting.text}"
        values = [constant(v) for v in script.outline.values(setting.text, event.function)]
        is_fixed = bool(values) and all(v is not ... and bool(v) == setting.is_true for v in values)
        is_resumed = any(tests_entry(event, guard) for guard in event.guards)
        when = "whenever the checkpoint has its state" if is_resumed else "in any case"
        place = passed_at(script, event)
        name = event.local.scaler if place is event.node else key
        return self.finding(
            script.where(place),
            f"`{name}` is created only if `{condition}`, but used here {when}: without it, {error}",
            instead=f"create it in any case, with enabled={condition}",
            severity="warning" if is_fixed or is_resumed else None,
        )


def _switched_off_without(script: Script, setting: Guard, event: Event) -> bool:
    """Whether a condition of a use is assigned False where its setting is tested: `elif model == "x": args.amp = False`."""
    words = set(re.findall(r"\w+", setting.text)) - {"args", "self", "config", "cfg", "not"}
    for guard in event.guards:
        assigned = [b for b in script.outline.bindings.get(guard.text, ()) if constant(b.value) is (not guard.is_true)]
        tests = [n.test for b in assigned for n in script.above(b.node) if isinstance(n, ast.If)]
        if any(words & set(re.findall(r"\w+", text_of(test))) for test in tests):
            return True
    return False


class ScalerNeverSaved(ScriptRule):
    """The scaler's state is restored but never saved."""

    code = "HS172"
    name = "scaler-never-saved"
    severity = "error"
    reason = (
        "The checkpoints of this script have no entry for the scaler, so restoring it raises KeyError at the first resume, or is skipped "
        "where the code tests for the key: the run then restarts at the initial scale of 65536."
    )
    bad = (_RESUME.format(first=_CREATE, second="", saved=""),)
    good = (_RESUME.format(first=_CREATE, second="", saved=_SAVED),)
    references = (f"{_AMP}#torch.amp.GradScaler.state_dict",)

    def check(self, script: Script) -> Iterator[Finding]:
        """States of scalers loaded from a key that no checkpoint of the file has."""
        if script.has("save_scaler") or not script.has("save_optimizer") or _written_elsewhere(script):
            return
        written = _written_keys(script)
        for event in {e.node: e for e in script.events("load_scaler")}.values():
            source = event.node.args[0] if isinstance(event.node, ast.Call) and event.node.args else None
            key, raises = _read_key(source)
            if not key or not written or key in written:
                continue
            raises = raises and not any(key in text for text, _ in event.guards)
            yield self.finding(
                script.where(event.node),
                f"no checkpoint of this script has the key {key!r}: restoring `{event.scaler}` {'raises KeyError' if raises else 'never happens'}",
                instead=f'save "{key}": {event.scaler}.state_dict() with the optimizer',
                severity="error" if raises else "warning",
            )


def _read_key(source: ast.expr | None) -> tuple[str, bool]:
    """The key that an expression reads from a checkpoint, and whether its absence raises."""
    if isinstance(source, ast.Subscript) and isinstance(constant(source.slice), str):
        return str(constant(source.slice)), True
    is_get = isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and source.func.attr == "get"
    if is_get and source.args and isinstance(constant(source.args[0]), str):  # type: ignore[union-attr]
        return str(constant(source.args[0])), False  # type: ignore[union-attr]
    return "", False


def _written_keys(script: Script) -> set[str]:
    """The keys of the dictionaries that contain an optimizer's state; none if one of them cannot be read in full."""
    keys: set[str] = set()
    for event in script.events("save_optimizer"):
        parent = script.outline.parents.get(event.node)
        if isinstance(parent, ast.keyword):
            parent = script.outline.parents.get(parent)
        if isinstance(parent, ast.Dict) and all(isinstance(constant(k), str) for k in parent.keys):
            keys |= {str(constant(k)) for k in parent.keys}
        elif isinstance(parent, ast.Call) and key_of(parent.func) == "dict" and all(k.arg for k in parent.keywords):
            keys |= {k.arg or "" for k in parent.keywords}
        else:
            return set()
    added = {key.rpartition("[")[2].strip("'\"]") for key in script.outline.bindings if "[" in key}
    return keys | added


def _written_elsewhere(script: Script) -> bool:
    """Whether a checkpoint may get further entries: a scaler passed on, or a dictionary that is updated."""
    handed = [e.node for e in script.events("handed", "stored") if isinstance(e.node, ast.Call)]
    return any(saves(text_of(call.func).rsplit(".", 1)[-1]) for call in handed) or adds_entries(script.outline)


class ApexStateNotSaved(ScriptRule):
    """A checkpoint contains the optimizer state but not the state of apex.amp."""

    code = "HS173"
    name = "apex-state-not-saved"
    severity = "warning"
    reason = (
        "apex.amp keeps its dynamic loss scale outside the optimizer. Without `amp.state_dict()` in the checkpoint a resumed run "
        "restarts at a scale of 65536 and skips its first steps until the scale fits again."
    )
    bad = (
        "import torch\nfrom apex import amp\nfrom models import build_model\nmodel, optimizer = build_model(args)\n"
        "checkpoint = torch.load(path)\noptimizer.load_state_dict(checkpoint['optimizer'])\nfor x in loader:\n    loss = model(x)\n    if args.apex:\n"
        "        with amp.scale_loss(loss, optimizer) as scaled_loss:\n            scaled_loss.backward()\n    optimizer.step()\n"
        "torch.save({'optimizer': optimizer.state_dict()}, path)\n",
    )
    good = (
        "import torch\nfrom apex import amp\nfrom models import build_model\nmodel, optimizer = build_model(args)\n"
        "checkpoint = torch.load(path)\noptimizer.load_state_dict(checkpoint['optimizer'])\namp.load_state_dict(checkpoint['amp'])\n"
        "for x in loader:\n    loss = model(x)\n    if args.apex:\n        with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        "            scaled_loss.backward()\n    optimizer.step()\ntorch.save({'optimizer': optimizer.state_dict(), 'amp': amp.state_dict()}, path)\n",
    )
    references = ("https://nvidia.github.io/apex/amp.html#checkpointing",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Saved optimizer states without that of Apex: all where one is restored here, or else a single one as advice."""
        is_resumed = script.has("load_optimizer")
        events = checkpoints_without_apex(script)
        for event in events if is_resumed else events[:1]:
            run = "a resumed run" if is_resumed else "a run that resumes from it"
            yield self.finding(
                script.where(event.node),
                f"the checkpoint contains the state of `{event.optimizer}` but not of apex.amp: {run} restarts at a scale of 65536",
                instead="save amp.state_dict() and call amp.load_state_dict(...) after amp.initialize",
                severity="warning" if is_resumed else "advice",
            )


RULES: tuple[type[Rule], ...] = (ScalerBeforeCreation, ScalerNeverSaved, ApexStateNotSaved)
