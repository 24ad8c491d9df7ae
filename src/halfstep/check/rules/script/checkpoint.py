"""HS170-HS171: the scaler's state in checkpoints."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from halfstep.check.finding import Edit, Finding, Fix
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.script.scaler import ScalerWithBf16
from halfstep.check.script.event import Event
from halfstep.check.script.names import key_of
from halfstep.check.script.script import Script
from halfstep.check.script.values import Scaler, constant, text_of

__all__ = ["RULES"]

_DOCS = "https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler.state_dict"
_TRAIN = """\
import torch
scaler = torch.amp.GradScaler("cuda")
if resume:
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
{load}for epoch in range(start, epochs):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(){save}}}, path)
"""
_SAVES = re.compile(r"save|load|ckpt|checkpoint|resume|state|register|Trainer|Engine|Manager", re.IGNORECASE)
_LOAD = '    if checkpoint.get("scaler"):\n        scaler.load_state_dict(checkpoint["scaler"])\n'
_SAVE = ', "scaler": scaler.state_dict()'


def _used(script: Script) -> list[Scaler]:
    """The scalers that may be enabled, that step an optimizer, and that float16 needs."""
    stepped = {e.scaler.rsplit(".", 1)[-1] for e in script.events("scaler_step")}
    idle = {id(s.node) for s in ScalerWithBf16.idle(script)}
    scalers = [s for s in script.scalers if s.key.rsplit(".", 1)[-1] in stepped and s.enabled != "no"]
    return [s for s in scalers if id(s.node) not in idle]


def _once(events: Iterator[Event]) -> list[Event]:
    return list({event.node: event for event in events}.values())


def _saved_elsewhere(script: Script) -> bool:
    """Whether a scaler is passed to something that saves or restores it."""
    calls = [e.node for e in script.events("handed") if isinstance(e.node, ast.Call)]
    return any(_SAVES.search(text_of(call.func)) for call in calls)


class ScalerNotSaved(ScriptRule):
    """A checkpoint contains the optimizer state but not the scaler state."""

    code = "HS170"
    name = "scaler-not-saved"
    severity = "warning"
    reason = (
        "A resumed run restarts at the initial scale of 65536 with the growth tracker at zero. If training had settled at a lower "
        "scale, the first steps after every resume overflow and are skipped while the learning-rate schedule advances, so the "
        "resumed run differs from an uninterrupted one. The script restores the optimizer, so the checkpoint is meant for resuming."
    )
    bad = (
        _TRAIN.format(load="", save=""),
        "import torch\nfrom torch.cuda.amp import GradScaler\nclass Trainer:\n    def __init__(self):\n        self.scaler = GradScaler()\n"
        "    def save(self):\n        state = {'net': self.net.state_dict(), 'optim': self.optimizer.state_dict()}\n        torch.save(state, 'x.pt')\n"
        "    def load(self):\n        state = torch.load('x.pt')\n        self.optimizer.load_state_dict(state['optim'])\n"
        "    def fit(self):\n        for x in self.data:\n            self.scaler.scale(self.net(x)).backward()\n"
        "            self.scaler.step(self.optimizer)\n            self.scaler.update()\n",
    )
    good = (_TRAIN.format(load=_LOAD, save=_SAVE),)
    references = (
        _DOCS,
        "https://github.com/huggingface/transformers/pull/11663",
        "https://github.com/ultralytics/ultralytics/pull/22189",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Saved optimizer states in scripts that restore them and never save a scaler."""
        scalers = _used(script)
        if not scalers or script.has("save_scaler"):
            return
        if _saved_elsewhere(script):
            return
        if any("scaler" in text for text in script.outline.strings if text.isidentifier()):
            return  # a key or attribute of that name: the scaler is saved some other way
        for event in _once(script.events("save_optimizer")):
            if _entry(script, event.node) is None or not _restored_with_steps(script, event):
                continue
            stepped = {e.scaler.rsplit(".", 1)[-1] for e in script.near(event, "scaler_step")}
            scaler = next((s for s in scalers if s.key.rsplit(".", 1)[-1] in stepped), scalers[0])
            yield self.finding(
                script.where(event.node),
                f"the checkpoint contains the optimizer state but not the state of `{scaler.key}`: a resumed run restarts at the initial scale",
                instead=f'save "scaler": {scaler.key}.state_dict() and call {scaler.key}.load_state_dict(...) where the optimizer is restored',
                fix=_fix(script, scalers),
            )


def _restored_with_steps(script: Script, event: Event) -> bool:
    """Whether the state saved here is also restored, in code that steps with a scaler."""
    return all(any(True for _ in script.near(event, kind)) for kind in ("scaler_step", "load_optimizer"))


def _restored_by_another_name(script: Script) -> bool:
    """Whether states are restored through a variable that iterates over several objects or is looked up by name."""
    for call, function in script.outline.calls.get("load_state_dict", ()):
        key = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        bound = script.outline.lookup(key, function) if key and "." not in key else []
        if any(b.value is None or isinstance(b.value, (ast.IfExp, ast.Subscript)) for b in bound):
            return True
        if any(isinstance(b.value, ast.Call) and text_of(b.value.func) == "getattr" for b in bound):
            return True
    return False


def _entry(script: Script, node: ast.AST) -> ast.AST | None:
    """Where a saved state ends up: a dictionary, a save call or an item assignment; None for comparisons and copies."""
    parent = script.outline.parents.get(node)
    # deepcopy(optimizer.state_dict()) and the like still end up in the checkpoint.
    while isinstance(parent, (ast.IfExp, ast.Starred, ast.BoolOp)) or (
        isinstance(parent, ast.Call) and not text_of(parent.func).rsplit(".", 1)[-1].startswith("save")
    ):
        node, parent = parent, script.outline.parents.get(parent)
    if isinstance(parent, ast.Dict):
        return parent
    if isinstance(parent, ast.keyword):
        call = script.outline.parents.get(parent)
        name = text_of(call.func) if isinstance(call, ast.Call) else ""
        return call if name == "dict" or "save" in name or "update" in name else None
    if isinstance(parent, ast.Call) and text_of(parent.func).rsplit(".", 1)[-1].startswith("save"):
        return parent
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Subscript):
        return parent
    return None


def _fix(script: Script, scalers: list[Scaler]) -> Fix | None:
    """Save and restore the scaler next to the optimizer, in all places at once; None if one of them is not simple."""
    scaler = scalers[0]
    # A scaler that may be None has no state to save.
    if len(scalers) != 1 or not scaler.key or script.outline.parents.get(scaler.node) is not scaler.parent:
        return None
    names: dict[str, str] = {}
    # Of several optimizers in one dictionary or one function, the first carries the scaler with it.
    saves = _first_of(_once(script.events("save_optimizer")), lambda e: script.outline.parents.get(e.node))
    edits: list[Edit | None] = [_save_edit(script, e, scaler, names) for e in saves]
    loads = [e for e in _once(script.events("load_optimizer")) if _loaded_key(e) in names or len(saves) == 1]
    edits += [_load_edit(script, e, scaler, names) for e in _first_of(loads, lambda e: e.function)]
    if not loads:
        return None
    complete = [edit for edit in edits if edit is not None]
    if len(complete) != len(edits):
        return None
    return Fix(f"save and restore {scaler.key} with the optimizer", tuple(sorted(complete)))


def _first_of(events: list[Event], group: Callable[[Event], object]) -> list[Event]:
    """The first event of each group."""
    first: dict[object, Event] = {}
    for event in sorted(events, key=lambda e: (getattr(e.node, "lineno", 0), getattr(e.node, "col_offset", 0))):
        first.setdefault(group(event), event)
    return list(first.values())


def _loaded_key(event: Event) -> object:
    """The key of a checkpoint that `optimizer.load_state_dict(checkpoint[key])` reads."""
    call = event.node
    source = call.args[0] if isinstance(call, ast.Call) and call.args else None
    return constant(source.slice) if isinstance(source, ast.Subscript) else None


def _save_edit(script: Script, event: Event, scaler: Scaler, names: dict[str, str]) -> Edit | None:
    """Add the scaler's entry after the optimizer's; `names` maps the optimizer's key to the scaler's."""
    entry = script.outline.parents.get(event.node)
    if not isinstance(entry, ast.Dict):
        return None
    key = next((k for k, v in zip(entry.keys, entry.values, strict=True) if v is event.node), None)
    value = constant(key)
    if key is None or not isinstance(value, str):
        return None
    quote = script.lines.source(key)[-1]
    names[value] = quote + (value.replace("optimizer", "scaler") if "optimizer" in value else "scaler") + quote
    text, end = script.lines.text, script.lines.span(event.node)[1]  # type: ignore[arg-type]
    line_start = script.lines.starts[key.lineno - 1]
    indent = text[line_start : script.lines.span(key)[0]]
    added = f"{names[value]}: {scaler.key}.state_dict()"
    rest = re.match(r",[ \t]*(\r\n|\r|\n)", text[end:])
    if rest and not indent.strip():  # one entry per line, each with its comma
        return Edit(end + 1, end + 1, f"{rest.group(1)}{indent}{added},")
    return Edit(end, end, f", {added}")


def _load_edit(script: Script, event: Event, scaler: Scaler, names: dict[str, str]) -> Edit | None:
    """Load the scaler's state after the optimizer's, if the checkpoint has one."""
    call = event.node
    statement = script.statement(call)
    if not isinstance(call, ast.Call) or not isinstance(statement, ast.Expr) or statement.value is not call:
        return None
    source = call.args[0] if call.args else None
    if not isinstance(source, ast.Subscript) or not isinstance(source.value, (ast.Name, ast.Attribute)):
        return None
    value = constant(source.slice)
    checkpoint = key_of(source.value)
    if not isinstance(value, str) or value not in names or not checkpoint:
        return None
    if not script.lines.alone(statement):
        return None
    # A disabled scaler saves an empty state, which an enabled one rejects.
    name = names[value]
    return script.lines.after(
        statement,
        f"if {checkpoint}.get({name}):\n{script.lines.indent_unit}{scaler.key}.load_state_dict({checkpoint}[{name}])",
    )


class ScalerNotRestored(ScriptRule):
    """The scaler state is saved but never restored."""

    code = "HS171"
    name = "scaler-not-restored"
    severity = "warning"
    reason = "The checkpoint contains the scale, but nothing loads it, so a resumed run still starts at the initial scale of 65536."
    bad = (_TRAIN.format(load="", save=_SAVE),)
    good = (_TRAIN.format(load=_LOAD, save=_SAVE),)
    references = (_DOCS, "https://github.com/huggingface/transformers/issues/34053")

    def check(self, script: Script) -> Iterator[Finding]:
        """Saved scaler states in scripts that restore only the optimizer."""
        if script.has("load_scaler") or not _used(script) or _saved_elsewhere(script):
            return
        if _restored_by_another_name(script):
            return
        for event in _once(script.events("save_scaler")):
            if _entry(script, event.node) is not None and _restored_with_steps(script, event):
                yield self.finding(
                    script.where(event.node),
                    f"the state of `{event.scaler}` is saved, but only the optimizer state is restored: a resumed run restarts at the initial scale",
                    instead=f"call {event.scaler}.load_state_dict(...) where the optimizer is restored",
                )


RULES: tuple[type[Rule], ...] = (ScalerNotSaved, ScalerNotRestored)
