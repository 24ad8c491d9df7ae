"""HS170: checkpoints without the scaler's state."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.fixes.checkpoint import scaler_state_fix
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.scaler.bf16 import ScalerWithBf16
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import switched_off, without_amp
from halfstep.check.script.flow.recognise import Recogniser
from halfstep.check.script.objects.engines import ACCELERATE, scaling_accelerator, scaling_fabric
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.saving import (
    entry_of,
    is_setting,
    names_scaler,
    passed_objects,
    saves,
    written_out,
)
from halfstep.check.script.objects.values import Scaler, text_of
from halfstep.check.script.saved.incomplete import incomplete_checkpoints
from halfstep.check.script.saved.several import unsaved_scalers
from halfstep.check.script.scaling.attached_states import ATTACHED, attached_states
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = [
    "DOCS", "LOAD", "RULES", "SAVE", "TRAIN", "callee_of", "created_scalers", "handed_scalers", "near_steps", "once", "stepping_scalers",
    "used_scalers",
]  # fmt: skip

DOCS = "https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler.state_dict"
TRAIN = """\
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
_SAVES = regex(r"save|load|ckpt|checkpoint|resume|state|register|Trainer|Engine|Manager", re.IGNORECASE)
_RESTORES = regex(r"load|resum|restor|restart", re.IGNORECASE)
_TRAINS = regex(r"train|fit|epoch|step|loop", re.IGNORECASE)
_BEST = regex(r"best|[<>](?!=? ?\d+$)")
_PAST_END = regex(r"^\(?(global_|total_)?(step|epoch|iteration|iter)s? >=? ")  # `if step >= max_steps: break`
_TPU = regex(r"^\(?[\w.]*(tpu|xla)[\w.]*(\(\))?\)?$", re.IGNORECASE)  # `is_torch_tpu_available()`, `args.tpu`
_WEIGHTS = regex(r"model|weight|peft|lora|adapter", re.IGNORECASE)
_OPTIMIZER = regex(r"optim", re.IGNORECASE)
LOAD = '    if checkpoint.get("scaler"):\n        scaler.load_state_dict(checkpoint["scaler"])\n'
SAVE = ', "scaler": scaler.state_dict()'


def used_scalers(script: Script) -> list[Scaler]:
    """The scalers that may be enabled, that step an optimizer, and that float16 needs."""
    stepped = {e.scaler.rsplit(".", 1)[-1] for e in script.events("scaler_step")}
    idle = {id(s.node) for s in ScalerWithBf16.idle(script)}
    scalers = [s for s in script.scalers if s.key.rsplit(".", 1)[-1] in stepped and s.enabled != "no"]
    return [s for s in scalers if id(s.node) not in idle]


def stepping_scalers(script: Script) -> list[Event]:
    """The steps of scalers that may be enabled and that float16 needs, also those that a training function of another file does."""
    idle = {s.key.rsplit(".", 1)[-1] for s in ScalerWithBf16.idle(script)}
    # Where another object steps (`accel.step(optimizer)`), `accel.scaler.unscale_` shows that it has a scaler.
    events = once(script.events("scaler_step", "owned_step", "unscale"))
    events += [
        e
        for e in once(script.events("handed", "stored"))
        if _TRAINS.search(callee_of(e))
        and (script.scalers_named(e.scaler) or created_scalers(script, e) or _is_annotated(script, e))
    ]
    return [
        e
        for e in events
        if e.scaler and e.scaler.rsplit(".", 1)[-1] not in idle and not switched_off(script, e) and not without_amp(e)
    ]


def created_scalers(script: Script, event: Event) -> list[Scaler]:
    """The scalers of an event's class that `self.scaler` may be: also `self._scaler`, which a property of that name returns."""
    name = event.scaler.rsplit(".", 1)[-1].lstrip("_")
    same = [s for s in script.scalers if s.key.rsplit(".", 1)[-1].lstrip("_") == name]
    return [s for s in same if s.enabled != "no" and s.function.cls == event.function.cls]


def _is_annotated(script: Script, event: Event) -> bool:
    """Whether the scaler of an event is a parameter whose annotation is torch's class: `scaler: GradScaler | None`."""
    arguments = getattr(event.function.node, "args", None)
    known = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs] if arguments is not None else []
    annotation = next((a.annotation for a in known if a.arg == event.local.scaler), None)
    parts = ast.walk(annotation) if annotation is not None else ()
    return any(script.outline.names.full(n).endswith("GradScaler") for n in parts if isinstance(n, ast.expr))


def callee_of(event: Event) -> str:
    """The last name of the function that an event calls."""
    return text_of(event.node.func).rsplit(".", 1)[-1] if isinstance(event.node, ast.Call) else ""


def once(events: Iterator[Event]) -> list[Event]:
    """The events of all traces, one for each place in the text."""
    return list({event.node: event for event in events}.values())


def handed_scalers(script: Script) -> list[Event]:
    """The calls of other files that receive a scaler to save or restore it."""
    handed = once(script.events("handed", "stored"))
    return [e for e in handed if isinstance(e.node, ast.Call) and _SAVES.search(text_of(e.node.func))]


class ScalerNotSaved(ScriptRule):
    """A checkpoint contains the optimizer state but not the scaler state."""

    code = "HS170"
    words = ("Accelerator(",)
    name = "scaler-not-saved"
    severity = "warning"
    reason = (
        "A resumed run restarts at the initial scale of 65536 with the growth tracker at zero. If training had settled at a lower "
        "scale, the first steps after every resume overflow and are skipped while the learning-rate schedule advances, so the "
        "resumed run differs from an uninterrupted one. Only resuming needs the optimizer state; the finding is advice where nothing in the "
        "file restores it."
    )
    bad = (
        TRAIN.format(load="", save=""),
        "import torch\nfrom torch.cuda.amp import GradScaler\nclass Trainer:\n    def __init__(self):\n        self.scaler = GradScaler()\n"
        "    def save(self):\n        state = {'net': self.net.state_dict(), 'optim': self.optimizer.state_dict()}\n        torch.save(state, 'x.pt')\n"
        "    def load(self):\n        state = torch.load('x.pt')\n        self.optimizer.load_state_dict(state['optim'])\n"
        "    def fit(self):\n        for x in self.data:\n            self.scaler.scale(self.net(x)).backward()\n"
        "            self.scaler.step(self.optimizer)\n            self.scaler.update()\n",
    )
    good = (TRAIN.format(load=LOAD, save=SAVE),)
    references = (
        DOCS,
        "https://github.com/huggingface/transformers/pull/11663",
        "https://github.com/ultralytics/ultralytics/pull/22189",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Saved optimizer states in scripts that step with a scaler and never save one."""
        steps = stepping_scalers(script)
        # A function that restores the scaler saves nothing.
        handed = [e for e in handed_scalers(script) if saves(callee_of(e)) or not _RESTORES.search(callee_of(e))]
        for event, other in () if handed or not steps else incomplete_checkpoints(script):
            yield self._report_incomplete(script, event, other)
        if missing := next(iter(() if handed else unsaved_scalers(script, steps)), None):
            yield self._report_missing(script, *missing)
            return
        if script.has("save_scaler") or handed or names_scaler(script.outline, script.scalers):
            return
        yield from self._owned(script)
        saved: dict[ast.AST, tuple[Event, str, str]] = {}
        passed = (*_spread(script, "save"), *attached_states(script, steps))
        for event in (*once(script.events("save_optimizer")), *passed):
            if _is_of_tpu(script, event) or _is_of_weights(script, event):
                continue
            scaler = event.scaler if event.kind == ATTACHED else _stepped_with(script, event, steps)
            is_entry = entry_of(script.outline, event.node) is not None
            if scaler and is_entry and not _has_owner(script, event, scaler, steps):
                saved.setdefault(_place(script, event), (event, scaler, _purpose(script, event)))
        resumed = [s for s in saved.items() if s[1][2] == "resumed"]
        # A run resumes from what is written during the training, seldom from what is saved once after it.
        resumed = [s for s in resumed if not _is_final(s[1][0])] or resumed
        # Only resuming needs an optimizer. Where nothing here restores one, a single advice is enough, at a checkpoint that is written regularly.
        others = sorted((s for s in saved.items() if s[1][2] != "final"), key=lambda s: s[1][2] != "unknown")
        together: dict[tuple[ast.AST | None, str], list[tuple[ast.AST, Event]]] = {}
        for place, (event, scaler, _) in resumed or others[:1]:
            together.setdefault((script.statement(event.node), scaler), []).append((place, event))
        for (_, scaler), entries in together.items():
            run = "a resumed run" if resumed else "a run that resumes from it"
            names = list(dict.fromkeys(f"`{event.optimizer}`" for _, event in entries))
            states = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
            yield self.finding(
                script.where(entries[0][0]),
                f"the checkpoint contains the state of {states} but not of `{scaler}`: {run} restarts at the initial scale",
                instead=f'save "scaler": {scaler}.state_dict() and call {scaler}.load_state_dict(...) where the optimizer is restored',
                fix=scaler_state_fix(script, used) if resumed and (used := used_scalers(script)) else None,
                severity="warning" if resumed else "advice",
            )

    def _report_incomplete(self, script: Script, event: Event, other: Event) -> Finding:
        return self.finding(
            script.where(event.node),
            f"this checkpoint contains the state of `{event.optimizer}` but not of `{other.scaler}`, which {script.at(other.node)} saves in another "
            "one: a run that resumes from it restarts at the initial scale",
            instead=f'save "scaler": {other.scaler}.state_dict() here as well',
        )

    def _report_missing(self, script: Script, place: ast.AST, step: Event, other: str) -> Finding:
        is_resumed = script.has("load_optimizer", "load_scaler")
        return self.finding(
            script.where(place),
            f"the state of `{other}` is saved but not that of `{step.scaler}`, which {script.at(step.node)} steps with: "
            f"{'a resumed run' if is_resumed else 'a run that resumes from it'} restarts that scaler at its initial scale",
            instead=f"save {step.scaler}.state_dict() as well, and restore it",
            severity="warning" if is_resumed else "advice",
        )

    def _owned(self, script: Script) -> Iterator[Finding]:
        """Saved optimizer states in a script whose scaler an Accelerator creates and never saves."""
        calls, loads = script.outline.calls, script.outline.loads
        if script.scalers or "save_state" in calls or "load_state" in calls or "scaler" in loads:
            return
        owner = scaling_accelerator(script) or scaling_fabric(script) if script.has("owned_backward") else None
        saved = once(script.events("save_optimizer")) if owner is not None else []
        saved = [e for e in saved if entry_of(script.outline, e.node) is not None]
        is_resumed = script.has("load_optimizer")
        if not is_resumed:
            # One advice where fp16 is certain, as for a scaler of the script.
            is_certain = owner is not None and owner.precision == "fp16"
            saved = [e for e in saved if is_certain and not _is_final(e)][:1]
        for event in saved:
            if owner is not None:
                is_fabric = owner.library != ACCELERATE
                scaler = f"{owner.key}.strategy.precision.scaler" if is_fabric else f"{owner.key}.scaler"
                option = "precision='16-mixed'" if is_fabric else "mixed_precision='fp16'"
                condition = "" if owner.precision == "fp16" else f"with {option} "
                whole = f"{owner.key}.save_state(...) and load_state(...), or save"
                yield self.finding(
                    script.where(_place(script, event)),
                    f"the checkpoint contains the state of `{event.optimizer}` but not of `{scaler}`: {condition}"
                    f"{'a resumed run' if is_resumed else 'a run that resumes from it'} restarts at the initial scale",
                    instead=f"{'save' if is_fabric else whole} {scaler}.state_dict() if it is not None",
                    severity="warning" if is_resumed else "advice",
                )


def _is_of_tpu(script: Script, event: Event) -> bool:
    """Whether a checkpoint is written only on a TPU, `xm.save(...)`, where `xm.optimizer_step` steps and nothing is scaled."""
    calls = [n for n in script.above(event.node) if isinstance(n, ast.Call)]
    return any(script.outline.names.full(call.func).startswith("torch_xla.") for call in calls) or any(
        is_true and _TPU.search(text) for text, is_true in event.guards
    )


def _is_of_weights(script: Script, event: Event) -> bool:
    """Whether a call of another file saves the weights alone, by its name, next to one that is named for the optimizer."""
    others = (name for name in script.outline.calls if _OPTIMIZER.search(name))
    name = callee_of(event)
    return bool(_WEIGHTS.search(name)) and not _OPTIMIZER.search(name) and any(map(saves, others))


def _has_owner(script: Script, event: Event, scaler: str, steps: list[Event]) -> bool:
    """Whether a call of another file has the object whose scaler steps: `CheckpointManager(accelerator).save(optimizer)`."""
    if not isinstance(event.node, ast.Call) or script.outline.call_target(event.node, event.function) is not None:
        return False
    functions = {id(e.function): e.function for e in steps if e.scaler == scaler}.values()
    keys = {key_of(value) for function in functions for value in script.outline.values(scaler, function)} | {scaler}
    owners = {key.rpartition(".")[0] for key in keys} - {"", "self"}
    receiver = key_of(event.node.func.value) if isinstance(event.node.func, ast.Attribute) else ""
    created = script.outline.values(receiver, event.function) if receiver else []
    calls = [event.node, *(value for value in created if isinstance(value, ast.Call))]
    return any(key_of(value) in owners for call in calls for value in arguments_of(call))


def _place(script: Script, event: Event) -> ast.AST:
    """The optimizer's entry, next to which the scaler's belongs; where it is passed as `**objects`, their dictionary."""
    spread = [k.value for k in event.node.keywords if k.arg is None] if isinstance(event.node, ast.Call) else []
    for value in spread:
        if (written := written_out(script.outline, value, event.function)) is not None:
            return written
    statement, entry = script.statement(event.node), entry_of(script.outline, event.node)
    return entry if isinstance(entry, ast.Assign) and not isinstance(statement, ast.Expr) else event.node


def _purpose(script: Script, event: Event) -> str:
    """What a checkpoint with an optimizer is for: resumed in this file, final, the best so far, or unknown."""
    if (
        script.has("load_optimizer")
        or "load_objects" in script.outline.calls
        or any(True for _ in _spread(script, "load", "restore", "resume"))
    ):
        return "resumed"
    if _is_final(event):
        return "final"
    best = any(_BEST.search(text) and " or " not in text and not _PAST_END.search(text) for text, _ in event.guards)
    return "best" if best else "unknown"


def _is_final(event: Event) -> bool:
    """Whether an optimizer is saved once, after the training."""
    return not event.loops and not saves(event.function.name) and event.kind != ATTACHED


def _spread(script: Script, *verbs: str) -> Iterator[Event]:
    """Calls of a function of this file that saves or restores whatever objects it receives: `save(path, **objects)`."""
    recogniser = Recogniser(script.outline)
    names = [name for name in script.outline.calls if any(verb in name for verb in verbs)]
    for call, function in (site for name in names for site in script.outline.calls[name]):
        target = script.outline.call_target(call, function)
        if target is None or isinstance(target.node, ast.Module):
            continue
        if target.node.args.kwarg is None and target.node.args.vararg is None:
            continue
        keys = passed_objects(script.outline, call, function)
        kinds = {recogniser.kind_of(key, function): key for key in keys if not is_setting(key)}
        if "optimizer" in kinds and not {"scaler", "wrapper"} & kinds.keys():
            yield Event("save_optimizer", call, function, optimizer=kinds["optimizer"])


def _stepped_with(script: Script, event: Event, steps: list[Event]) -> str:
    """The scaler whose state belongs to a saved optimizer; "" if none is known.

    A base class that creates the scaler, and saves the optimizer, leaves the steps to the classes of other files.
    """
    near = near_steps(script, event, steps)
    own = [e for e in near if e.optimizer.rsplit(".", 1)[-1] == event.optimizer.rsplit(".", 1)[-1]]
    if near:
        return (own or near)[0].scaler
    idle = {id(s.node) for s in ScalerWithBf16.idle(script)}
    created = [s for s in script.scalers if s.key.startswith("self.") and s.enabled != "no" and id(s.node) not in idle]
    is_base = not steps and event.function.cls and not any(script.has(kind) for kind in ("opt_step", "update"))
    return next((s.key for s in created if is_base and s.function.cls == event.function.cls), "")


def near_steps(script: Script, event: Event, steps: list[Event]) -> list[Event]:
    """The steps connected to a save; all of them, if it is in a helper that nothing in this file calls."""
    kinds = ("scaler_step", "owned_step", "unscale", "handed", "stored")
    near = [e for e in script.near(event, *kinds) if any(e.node is s.node for s in steps)]
    function, outline = event.function, script.outline
    sites = outline.calls.get(function.name, ())  # also torch.save, if the function is called `save`
    is_called = any(outline.call_target(site.call, site.function) is function for site in sites)
    near = near or [e for e in steps if _has_field(script, function.cls, e.scaler.rsplit(".", 1)[-1])]
    return near or (steps if saves(function.name) and not function.cls and not is_called else [])


def _has_field(script: Script, cls: str, name: str) -> bool:
    """Whether a class declares the scaler that steps as its field: `scaler: GradScaler` of a dataclass."""
    nodes = (n for n in script.outline.module.node.body if isinstance(n, ast.ClassDef) and n.name == cls)
    fields = [s for node in nodes for s in node.body if isinstance(s, ast.AnnAssign) and key_of(s.target) == name]
    return any("GradScaler" in text_of(s.annotation) for s in fields)


RULES: tuple[type[Rule], ...] = (ScalerNotSaved,)
