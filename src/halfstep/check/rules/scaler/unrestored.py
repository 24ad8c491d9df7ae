"""HS171: the scaler's state is saved and never restored."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.scaler.bf16 import ScalerWithBf16
from halfstep.check.rules.script.checkpoint import (
    DOCS,
    LOAD,
    SAVE,
    TRAIN,
    callee_of,
    created_scalers,
    handed_scalers,
    near_steps,
    once,
    stepping_scalers,
    used_scalers,
)
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.saving import entry_of, restored_copies, restored_counter, saves
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.saved.apex import unrestored_apex
from halfstep.check.script.saved.attached import unrestored_attached
from halfstep.check.script.saved.several import unrestored_scalers
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_LOADS = regex(r"load|resum|restor|register|setup|init", re.IGNORECASE)
# Names of what is not a scaler.
_OTHERS = regex(
    r"optim|(^|_)opts?$|model|(^|_)nets?($|_)|sched|(^|_)ema($|_)|discriminator|generator|encoder", re.IGNORECASE
)


def _only_saves(event: Event) -> bool:
    """Whether a function of another file, named for checkpoints, receives a scaler next to its optimizer and in a loop."""
    name = callee_of(event)
    parts = [key_of(v) for v in arguments_of(event.node)] if isinstance(event.node, ast.Call) else []
    is_checkpoint = saves(name) or bool(re.search(r"(checkpoint|ckpt)$", name, re.IGNORECASE))
    return is_checkpoint and not _LOADS.search(name) and bool(event.loops) and any("optim" in part for part in parts)


def _restored_by_another_name(script: Script) -> bool:
    """Whether states are restored through a variable that may be the scaler: of a loop, of a choice, or looked up by name."""
    for call, function in script.outline.calls.get("load_state_dict", ()):
        key = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        is_open = bool(key) and "." not in key and not _OTHERS.search(key)
        for bound in script.outline.lookup(key, function) if is_open else ():
            sources: list[ast.expr | None] = [bound.value]
            if bound.value is None:
                loops = (n for n in script.above(call) if isinstance(n, ast.For))
                sources = [loop.iter for loop in loops if key in {text_of(n) for n in ast.walk(loop.target)}] or [None]
            elif isinstance(bound.value, ast.IfExp):
                sources = [bound.value.body, bound.value.orelse]
            elif not isinstance(bound.value, ast.Subscript) and not text_of(bound.value).startswith("getattr("):
                continue
            if not all(source is not None and _OTHERS.search(_collection(source)) for source in sources):
                return True
    return False


def _collection(source: ast.expr) -> str:
    """The variable that a loop goes through, `optimizers` of `optimizers.items()`, or the model of `model.module`."""
    while isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and not source.args:
        source = source.func.value
    return key_of(source).removesuffix(".module").removesuffix("._orig_mod").rsplit(".", 1)[-1]


class ScalerNotRestored(ScriptRule):
    """The scaler state is saved but never restored."""

    code = "HS171"
    name = "scaler-not-restored"
    severity = "warning"
    reason = "The checkpoint contains the scale, but nothing loads it, so a resumed run still starts at the initial scale of 65536."
    bad = (TRAIN.format(load="", save=SAVE),)
    good = (TRAIN.format(load=LOAD, save=SAVE),)
    references = (DOCS, "https://github.com/huggingface/transformers/issues/34053")

    def check(self, script: Script) -> Iterator[Finding]:
        """Saved scaler states in scripts that restore only the optimizer."""
        if (unrestored := unrestored_apex(script)) is not None:
            is_resumed = script.has("load_optimizer")
            restored = "the optimizer state is" if is_resumed else "other states are"
            yield self.finding(
                script.where(unrestored),
                f"the state of apex.amp is saved, but only {restored} restored: a resumed run restarts at a scale of 65536",
                instead="call amp.load_state_dict(...) after amp.initialize",
                severity="warning" if is_resumed else "advice",
            )
        for scaler, call in restored_copies(script.outline, script.scalers):
            if own := [s.key for s in used_scalers(script) if s.key]:
                yield self.finding(
                    script.where(scaler.node),
                    f"`{text_of(call.func)}` restores a new GradScaler, which nothing uses: `{own[0]}` keeps the initial scale",
                    instead=f"pass `{own[0]}`",
                )
                return
        handed = handed_scalers(script)
        for step, other in () if handed else unrestored_scalers(script, stepping_scalers(script)):
            yield self.finding(
                script.where(step.node),
                f"the state of `{step.scaler}` is saved, but only that of `{other}` is restored: a resumed run restarts it at the initial scale",
                instead=f"call {step.scaler}.load_state_dict(...) as well",
            )
        for call, attached in () if script.has("load_scaler") else unrestored_attached(script):
            yield self.finding(
                script.where(call),
                f"the state of `{attached}` is saved, but only the other objects are restored: a resumed run restarts at the initial scale",
                instead=f'restore "scaler": {attached} here as well',
            )
        if script.has("load_scaler") or not all(map(_only_saves, handed)) or _restored_by_another_name(script):
            return
        stepping, idle = stepping_scalers(script), {id(s.node) for s in ScalerWithBf16.idle(script)}
        for event in once(script.events("save_scaler")) or handed[:1]:
            # A base class that saves its scaler leaves the steps to the classes of other files.
            is_used = near_steps(script, event, stepping) or (
                event.function.cls and any(id(s.node) not in idle for s in created_scalers(script, event))
            )
            passed = f"`{callee_of(event)}` is passed `{event.scaler}` to save it"
            saved = passed if event.kind in {"handed", "stored"} else f"the state of `{event.scaler}` is saved"
            is_entry = event.kind in {"handed", "stored"} or entry_of(script.outline, event.node) is not None
            counter = restored_counter(script.outline, script.scalers, event.function, event.local.scaler)
            restored = "the optimizer state is restored" if script.has("load_optimizer") else counter
            if is_entry and is_used and restored:
                yield self.finding(
                    script.where(event.node),
                    f"{saved}, but only {restored}: a resumed run restarts at the initial scale",
                    instead=f"call {event.scaler}.load_state_dict(...) where {restored}",
                )


RULES: tuple[type[Rule], ...] = (ScalerNotRestored,)
