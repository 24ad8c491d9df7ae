"""Whether a scaler or a precision flag exists where it is used: created below its use, or only under a condition."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.flow.conditions import Conditions, holds_without
from halfstep.check.script.flow.event import Event, Guard
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.order import is_amp, is_setting
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.unbound import own_lineage
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Binding, Function

__all__ = ["EarlyRead", "created_later", "created_under", "flags_read_early", "passed_at", "tests_entry"]

_DEVICE = regex(r"cuda|gpu|cpu|mps|device|available|rank|world|distributed|except@|case@|class@", re.IGNORECASE)
_FLAG = regex(r"^self\._?(use_|enable_)?(amp|fp16|bf16|mixed_precision|autocast|(amp_)?dtype|precision)(_enabled)?$")
_DYNAMIC = regex(r"\bsetattr\(self|__getattr(ibute)?__|__dict__|vars\(self\)")
_ATTRIBUTE = regex(r"\bself\.\w+")
_NAME = regex(r"[A-Za-z_][\w.]*")
_ENTRY = regex(r"^'[^']*' in ([\w.]+?)(?:\.keys\(\))?$|^([\w.]+)\.get\('[^']*'(?:, None)?\)$")
_AMP_NAME = regex(r"amp(?<![a-z]amp)|fp16|half|mixed|16", re.IGNORECASE)


class EarlyRead(NamedTuple):
    """A read of an attribute in a method that `__init__` calls before it assigns the attribute."""

    key: str
    node: ast.AST
    call: ast.Call
    first: int  # the line of the first assignment


def flags_read_early(script: Script) -> Iterator[EarlyRead]:
    """The precision flags of classes that a method reads, in any case, before `__init__` assigns them."""
    outline = script.outline
    keys = [key for key in outline.bindings if _FLAG.match(key)]
    for key in keys if keys and not _DYNAMIC.search(script.source.text) else ():
        scopes = {b.function for b in outline.bindings[key]}
        scope = next(iter(scopes)) if len(scopes) == 1 else None
        if scope is None or scope.name != "__init__" or not scope.method or not _is_complete(script, key, scope):
            continue
        first = min(getattr(b.node, "lineno", 0) for b in outline.bindings[key])
        for name, method in outline.classes.get(scope.cls, {}).items():
            calls = [call for call, caller in outline.calls.get(name, ()) if caller is scope and call.lineno < first]
            calls = [call for call in calls if text_of(call.func) == f"self.{name}" and _is_direct(script, call)]
            reads = [n for n in ast.walk(method.node) if isinstance(n, ast.Attribute) and text_of(n) == key]
            read = next(
                (n for n in reads if isinstance(n.ctx, ast.Load) and _is_unconditional(script, n, method)), None
            )
            if calls and read is not None:
                yield EarlyRead(key, read, calls[0], first)


def _is_complete(script: Script, key: str, scope: Function) -> bool:
    """Whether a class and its bases have no other definition of an attribute: in a body, as a property, or in a library."""
    outline, name = script.outline, key.removeprefix("self.")
    lineage = own_lineage(script, scope.cls)
    bases = {text_of(base) for member in lineage for base in outline.bases.get(member, ())}
    if name == "dtype" and any(base.endswith("LightningModule") for base in bases):
        return False  # a property of Lightning's modules
    bindings = outline.bindings.get(name, ())  # a local variable of the same name is no attribute
    in_body = any(isinstance(outline.parents.get(b.node), ast.ClassDef) for b in bindings)
    return bool(lineage) and not in_body and not any(name in outline.classes.get(member, {}) for member in lineage)


def _is_direct(script: Script, call: ast.Call) -> bool:
    """Whether a call runs where it is written and its error is not caught: outside loops, lambdas and `try`."""
    delays = (ast.Lambda, ast.Try, ast.For, ast.AsyncFor, ast.While)
    return not any(isinstance(node, delays) for node in script.above(call))


def _is_unconditional(script: Script, node: ast.AST, method: Function) -> bool:
    """Whether a method always evaluates an expression, or raises before: it is in no branch, loop or inner function."""
    inner = node
    for outer in script.above(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            line = getattr(inner, "lineno", 0)
            return outer is method.node and not any(_may_return(s) for s in outer.body if s.lineno < line)
        if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test:
            return False
        if isinstance(outer, ast.BoolOp) and inner is not outer.values[0]:
            return False
        if isinstance(outer, (ast.Try, ast.Lambda, ast.For, ast.AsyncFor, ast.While, ast.comprehension)):
            return False
        inner = outer
    return False


def _may_return(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Return) for node in ast.walk(statement))


def created_later(script: Script, event: Event) -> int | None:
    """The line that first assigns a scaler, if that is after the event's line in the function that creates it."""
    start, scope, bindings = _start(script, event)
    if scope is None or any(b.function is not scope for b in bindings) or not _is_own(script, event, scope):
        return None
    if event.scaler.startswith("self.") and scope.name != "__init__":
        return None  # only __init__ decides the order
    first = min(getattr(b.node, "lineno", 0) for b in bindings)
    if first <= getattr(start, "lineno", 0) or any(text.startswith("except@") for text, _ in event.guards):
        return None
    # In a loop, the assignment of an earlier iteration counts.
    loops = {node for node in _around(script, start) if isinstance(node, (ast.For, ast.AsyncFor, ast.While))}
    return None if any(loops & set(_around(script, b.node)) for b in bindings) else first


def created_under(script: Script, trace: Trace, event: Event) -> Guard | None:
    """The setting without which a scaler is never assigned, if the event uses it whatever that setting is."""
    place, scope, bindings = _start(script, event)
    bindings = _without_fallbacks(script, bindings)
    if event.scaler.startswith("self."):
        is_init = len(bindings) == 1 and _is_setup(script, bindings[0].function)
        scope = bindings[0].function if is_init and bindings[0].function.cls == event.function.cls else None
        if scope is not None and event.scaler.removeprefix("self.") in script.outline.classes.get(scope.cls, {}):
            return None  # a property
        if _AMP_NAME.search(event.function.name):
            return None  # `train_epoch_amp`: called with mixed precision only
    if scope is None or len(bindings) != 1 or bindings[0].function is not scope or not _is_own(script, event, scope):
        return None
    creation = _creation(script, trace, event, bindings[0])
    if creation is None:
        return None
    # What the callers of __init__ test is not known where a method runs.
    own = _tests_around(script, bindings[0].node, scope)
    known = own if event.scaler.startswith("self.") else creation.guards
    guards = [_uncopied(script, guard) for guard in known]
    used = [_uncopied(script, guard) for guard in (*event.guards, *event.local.guards)]
    if passed_at(script, event) is not event.node and not _ends_between(scope, creation.node, place):
        # The call reads the variable, whatever the function that it calls tests.
        outer = {*_tests_around(script, place, scope), *(g for g in creation.guards if g not in own)}
        used = [_uncopied(script, guard) for guard in event.guards if guard in outer]
    missing = [g for g in guards if g not in used and _is_fixed(script, g, creation) and not _DEVICE.search(g.text)]
    if not missing:
        return None
    others = [guard for guard in used if guard not in guards]
    others = [g for g in others if not holds_without(script.outline, event.function, g, missing[0])]
    # A checkpoint with the entry may be from a run with the setting.
    others = [g for g in others if not tests_entry(event, g)]
    if any(is_amp(guard) or guard.text.startswith("except@") for guard in others):
        return None  # another name for the same setting
    if not all(map(is_amp, missing)) and any(is_setting(script, guard, event) for guard in others):
        return None  # `args.train` and `mode == "train"` may be the same
    return missing[0] if possible((missing[0].opposite,), tuple(used)) else None


def _without_fallbacks(script: Script, bindings: list[Binding]) -> list[Binding]:
    """The assignments without those in a handler of a `try` that has another: both create the scaler, for different versions of torch."""
    tried = [node for b in bindings for node in _around(script, b.node) if isinstance(node, ast.Try)]
    again = set()
    for node in tried:
        first = {part for statement in node.body for part in ast.walk(statement)}
        if any(b.node in first for b in bindings):
            again |= {part for handler in node.handlers for part in ast.walk(handler)}
    return [b for b in bindings if b.node not in again]


def tests_entry(event: Event, guard: Guard) -> bool:
    """Whether a condition is that the checkpoint has what the event loads: `"scaler" in checkpoint`, whatever this run's setting is."""
    call = event.node if event.kind == "load_scaler" else None
    source = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if isinstance(source, ast.Subscript):
        owner = key_of(source.value)
    else:
        func = source.func if isinstance(source, ast.Call) else None
        owner = key_of(func.value) if isinstance(func, ast.Attribute) and func.attr == "get" else ""
    match = _ENTRY.match(guard.text) if owner and guard.is_true else None
    return match is not None and owner in match.groups()


def passed_at(script: Script, event: Event) -> ast.AST:
    """Where a scaler's variable is read on the way to its use: the argument of a call, or the use itself."""
    place, scope, _ = _start(script, event)
    if scope is None or place is event.node or not isinstance(place, ast.Call):
        return event.node
    return next((value for value in arguments_of(place) if key_of(value) == event.scaler), event.node)


def _uncopied(script: Script, guard: Guard) -> Guard:
    """A condition of which the attributes that copy a parameter have its name: `args.amp` for `self.args.amp`."""

    def name(match: re.Match[str]) -> str:
        values = [b.value for b in script.outline.bindings.get(match.group(), ())]
        return values[0].id if len(values) == 1 and isinstance(values[0], ast.Name) else match.group()

    return Guard(_ATTRIBUTE.sub(name, guard.text.partition("#")[0]), guard.is_true)


def _is_setup(script: Script, function: Function) -> bool:
    """Whether a method always runs before the others: `__init__`, or one that methods of the class call without a condition."""
    if function.name == "__init__":
        return True
    calls = script.outline.calls.get(function.name, ()) if function.method else ()
    if not calls or _AMP_NAME.search(function.name):
        return False
    delays = (ast.If, ast.IfExp, ast.BoolOp, ast.Lambda, ast.Try)
    return all(
        caller.cls == function.cls and not any(isinstance(node, delays) for node in script.above(call))
        for call, caller in calls
    )


def _ends_between(scope: Function, first: ast.AST, last: ast.AST) -> bool:
    """Whether a function may end, or a loop continue, between two of its lines: what follows has a further condition."""
    lines = range(getattr(first, "lineno", 0), getattr(last, "lineno", 0))
    ends = (n for n in ast.walk(scope.node) if isinstance(n, (ast.Return, ast.Raise, ast.Continue, ast.Break)))
    return any(node.lineno in lines for node in ends)


def _tests_around(script: Script, node: ast.AST, function: Function) -> tuple[Guard, ...]:
    """The conditions around a node in its own function."""
    conditions = Conditions(script.outline, function)
    guards: tuple[Guard, ...] = ()
    for parent in _around(script, node):
        if isinstance(parent, ast.If):
            guards += conditions.guards(parent.test, is_true=any(node is s for s in parent.body))
        node = parent
    return guards


def _is_fixed(script: Script, guard: Guard, creation: Event) -> bool:
    """Whether a condition around the creation of a scaler still is what it was then."""
    if creation.loops:
        return is_setting(script, guard, creation)
    line = getattr(creation.node, "lineno", 0)
    for name in _NAME.findall(guard.text):
        bindings = script.outline.bindings.get(name, ())
        # What is assigned below, as `checkpoint = torch.load(checkpoint)` in the other branch, no longer matters.
        before = [b for b in bindings if b.function is not creation.function or getattr(b.node, "lineno", 0) < line]
        if len(before) > 1:
            return False
    return True


def _creation(script: Script, trace: Trace, event: Event, binding: Binding) -> Event | None:
    """The event that creates a scaler by `scaler = GradScaler()`; for a local variable in the same run of its function."""
    events = script.events("make_scaler") if event.scaler.startswith("self.") else iter(trace)
    for creation in events:
        is_before = event.scaler.startswith("self.") or event.roots[: len(creation.roots)] == creation.roots
        if is_before and creation.node is binding.value and creation.function is binding.function:
            return creation
    return None


def _is_own(script: Script, event: Event, scope: Function) -> bool:
    """Whether a scaler's variable is assigned by the function `scope` alone, as far as the file shows."""
    key, outline = event.scaler, script.outline
    if not any(s.key == key for s in script.scalers):
        return False
    if key.startswith("self."):
        return _is_complete(script, key, scope)
    return "." not in key and "[" not in key and key not in scope.params and key not in outline.names.table


def _start(script: Script, event: Event) -> tuple[ast.AST, Function | None, list[Binding]]:
    """The call, or the event itself, that leads to a use from the function that assigns the scaler, and its assignments."""
    outline = script.outline
    bindings = outline.bindings.get(event.scaler, [])
    for place in (event.node, *reversed(event.roots)) if bindings else ():
        outermost = deque(_around(script, place), maxlen=1)
        own = outline.by_function(event.scaler).get(outermost[0]) if outermost else None
        if own:
            scope = own[0].function
            shared = scope is outline.module or _is_shared(scope, event.scaler)
            return place, scope, bindings if shared else own
    return event.node, None, bindings


def _is_shared(scope: Function, key: str) -> bool:
    """Whether other functions may assign a variable: an attribute, or one that is declared global or nonlocal."""
    declared = (n for n in ast.walk(scope.node) if isinstance(n, (ast.Global, ast.Nonlocal)))
    return not key.isidentifier() or any(key in node.names for node in declared)


def _around(script: Script, node: ast.AST) -> Iterator[ast.AST]:
    """What contains a node, up to and including its function or the module."""
    parent = script.outline.parents.get(node)
    while parent is not None:
        yield parent
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)):
            return
        parent = script.outline.parents.get(parent)
