"""The steps of the optimizer that a call creates, wherever it is stored.

opts = {"g": Adam(G.parameters()), "d": ...}      scaler.step(opts["g"]), scaler.step(opts[name])
optimizers = [Adam(G.parameters()), ...]          for optimizer in optimizers: scaler.step(optimizer)
opt = self.opts["g"]                              scaler.step(opt)
"""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["steps_of"]

_ENTRY = regex(r"^(\w+)\[(.+)\]$")
_FIXED = re.compile(r"^('.*'|\".*\"|-?\d+)$")
_ANY = "*"  # an entry under a key that a comprehension computes
_LOOPED = {"values", "items"}


def _names_of(script: Script, by: ast.Call) -> set[str]:
    """The last names that an optimizer is assigned to, also by the callers of a function that returns it; entries as `opts['g']`."""
    statement, entry = _stored(script, by)
    statements = [statement]
    if isinstance(statement, ast.Return):
        around = next((n for n in script.above(by) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))), None)
        sites = script.outline.calls.get(around.name, ()) if around is not None else ()
        statements = [script.statement(call) for call, _ in sites]
    targets = [t for s in statements if isinstance(s, ast.Assign) for t in s.targets]
    parts = [p for t in targets for p in (t.elts if isinstance(t, ast.Tuple) else [t])]
    names = {last_name(key_of(part)) for part in parts} - {""}
    return {f"{name}[{entry}]" for name in names} if entry else names


def _stored(script: Script, by: ast.Call) -> tuple[ast.stmt | None, str]:
    """The statement around a call, and the key of the list or dictionary in it that gets the result."""
    child: ast.AST = by
    parent = script.outline.parents.get(by)
    entry = ""
    while parent is not None and not isinstance(parent, ast.stmt):
        if isinstance(parent, ast.Dict) and child in parent.values:
            key = parent.keys[parent.values.index(child)] if isinstance(child, ast.expr) else None
            entry = repr(key.value) if isinstance(key, ast.Constant) else _ANY
        elif isinstance(parent, ast.List) and isinstance(child, ast.expr):
            entry = str(parent.elts.index(child))
        elif isinstance(parent, (ast.DictComp, ast.ListComp)):
            entry = _ANY
        elif isinstance(parent, ast.Call) and key_of(parent.func) == "dict" and isinstance(child, ast.keyword):
            entry = repr(child.arg)
        child, parent = parent, script.outline.parents.get(parent)
    return parent, entry


def steps_of(script: Script, by: ast.Call, *kinds: str) -> list[Event]:
    """The events of these kinds that step the optimizer that a call creates."""
    names = _names_of(script, by)
    return [event for event in script.events(*kinds) if _is_one_of(script, event, event.optimizer, names)]


def _is_one_of(script: Script, event: Event, key: str, names: set[str], *, follows: bool = True) -> bool:
    """Whether the variable that an event steps may be one of these."""
    name = key.rpartition(".")[2] if "[" not in key else re.sub(r"^(\w+\.)+", "", key)
    if not name or name in names:
        return bool(name)
    stored = {match[1]: match[2] for match in map(_ENTRY.match, names) if match}
    if not stored:
        return False
    entry = _ENTRY.match(name)
    if entry is not None:
        is_open = not _FIXED.match(entry[2])
        return any(entry[1] == owner and (is_open or own == _ANY) for owner, own in stored.items())
    return follows and (_is_looped(script, event, name, set(stored)) or _is_copied(script, event, name, names))


def _is_copied(script: Script, event: Event, name: str, names: set[str]) -> bool:
    """Whether a variable is an entry that a line assigns to it: `opt = self.opts[key]`."""
    bound = script.outline.lookup(name, event.function)
    keys = {key_of(b.value) for b in bound if b.index is None and isinstance(b.value, ast.Subscript)} - {""}
    return any(_is_one_of(script, event, key, names, follows=False) for key in keys)


def _is_looped(script: Script, event: Event, name: str, owners: set[str]) -> bool:
    """Whether a loop around an event takes a variable from a list or dictionary: `for opt in opts.values():`."""
    for parent in script.above(event.node):
        targets = {key_of(n) for n in ast.walk(parent.target)} if isinstance(parent, ast.For) else set()
        if isinstance(parent, ast.For) and name in targets:
            return any(last_name(key_of(n)) in owners for n in ast.walk(parent.iter) if isinstance(n, ast.expr))
    return False
