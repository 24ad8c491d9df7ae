"""The state of apex.amp, which contains its dynamic loss scale: checkpoints without it, and states that nothing restores."""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.command_line import Options
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.saving import entry_of, saves
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.saved.incomplete import checkpoint_of, is_saved_as_it_is
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes

__all__ = ["checkpoints_without_apex", "unrestored_apex"]

_AMP = regex(r"(^|_)(apex|amp)($|_)", re.IGNORECASE)
_RESUMES = regex(r"resum|restart|continue", re.IGNORECASE)


def checkpoints_without_apex(script: Script) -> list[Event]:
    """The saved optimizer states of a script that trains with Apex, in checkpoints without Apex's state."""
    calls = script.outline.library_calls
    if not calls.keys() & {"apex.amp.scale_loss", "apex.amp.initialize"} or not _scales_dynamically(script):
        return []
    # A function of another file that gets the optimizer may save Apex's state, which is global, by itself.
    saved = {e.node: e for e in script.events("save_optimizer") if _writes_state(e.node)}
    entries = (e for e in saved.values() if entry_of(script.outline, e.node) is not None)
    events = [e for e in entries if not _is_without_apex(script, e)]
    if "apex.amp.state_dict" not in calls:
        return [] if _names_state(script) or _is_passed_on(script) else events
    if "apex.amp.load_state_dict" not in calls:
        return []
    written = {event: checkpoint_of(script, event) for event in events}
    if not any(checkpoint is not None and _has_state(checkpoint) for checkpoint in written.values()):
        return []
    return [
        event
        for event, checkpoint in written.items()
        if checkpoint is not None
        and (event.loops or saves(event.function.name))
        and not _has_state(checkpoint)
        and is_saved_as_it_is(script, checkpoint, event)
    ]


def _is_without_apex(script: Script, event: Event) -> bool:
    """Whether a checkpoint is written only where a condition of the calls of Apex does not hold: `if args.apex: ... else:`."""
    sites = [s for full, calls in script.outline.library_calls.items() if full.startswith("apex.amp.") for s in calls]
    needed = {guard for site in sites for guard in conditions_of(script.outline, site.call)}
    own = (*event.guards, *conditions_of(script.outline, event.node))
    return any(guard.opposite in needed for guard in own)


def unrestored_apex(script: Script) -> ast.Call | None:
    """The first call that saves Apex's state, in a script that resumes runs without restoring it."""
    calls = script.outline.library_calls
    if "apex.amp.load_state_dict" in calls or "apex.amp.state_dict" not in calls or _is_passed_on(script):
        return None
    saved = [site.call for site in calls["apex.amp.state_dict"] if entry_of(script.outline, site.call) is not None]
    saved.sort(key=lambda call: call.lineno)
    return saved[0] if saved and (script.has("load_optimizer") or _resumes_weights(script)) else None


def _resumes_weights(script: Script) -> bool:
    """Whether a script loads a checkpoint to resume from, by the name of its path, into any object."""
    sites = script.outline.library_calls.get("torch.load", ())
    return "load_state_dict" in script.outline.calls and any(_RESUMES.search(text_of(site.call)) for site in sites)


def _scales_dynamically(script: Script) -> bool:
    """Whether no amp.initialize has a level without a dynamic scale, O0 or O3, or a fixed scale: a number, or an option with one."""
    for call, _ in script.outline.library_calls.get("apex.amp.initialize", ()):
        if constant(argument(call, 3, "opt_level")) in {"O0", "O3"}:
            return False
        scale = argument(call, 8, "loss_scale")
        if scale is not None and _default_of(script, scale) not in {None, "dynamic"}:
            return False
    return True


def _default_of(script: Script, node: ast.expr) -> object:
    """The value of a literal, or the default of the option that an expression reads; ... for any other."""
    if constant(node) is not ... or not isinstance(node, ast.Attribute):
        return constant(node)
    declared = [call for call, _, name in Options(script).declared if name == node.attr]
    default = argument(declared[0], None, "default") if len(declared) == 1 else node
    return None if default is None else constant(default)


def _names_state(script: Script) -> bool:
    """Whether the string "amp" is a key; as the name of a backend, `backend == "amp"`, it is none."""
    named = (n for n in all_nodes(script.tree) if isinstance(n, ast.Constant) and n.value == "amp")
    return any(not isinstance(script.outline.parents.get(n), ast.Compare | ast.IfExp) for n in named)


def _has_state(checkpoint: ast.AST) -> bool:
    """Whether a dictionary has an entry for Apex: named `amp`, or with the state itself."""
    keys = checkpoint.keys if isinstance(checkpoint, ast.Dict) else []
    names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    names += [k.arg for k in checkpoint.keywords if k.arg] if isinstance(checkpoint, ast.Call) else []
    return "amp.state_dict()" in text_of(checkpoint) or any(_AMP.search(name) for name in names)


def _is_passed_on(script: Script) -> bool:
    """Whether the module itself is a value, `load_checkpoint(model, optimizer, amp)`: what receives it may restore its state."""
    names = {name for name, full in script.outline.names.table.items() if full == "apex.amp"}
    parents = script.outline.parents
    loads = (
        n for n in all_nodes(script.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in names
    )
    return any(not isinstance(parents.get(n), ast.Attribute | ast.Compare) for n in loads)


def _writes_state(node: ast.AST) -> bool:
    """Whether a call reads a state, or saves an object itself."""
    text = text_of(node)
    return "state_dict" in text or text.startswith("torch.save(")
