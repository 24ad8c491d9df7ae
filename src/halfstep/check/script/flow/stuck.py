"""Accumulation windows that never end: nothing but the step's own branch advances their counter."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.check.regex import regex
from halfstep.check.script.flow.conditions import leaves_block
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["StuckWindow", "stuck_window"]

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_BEFORE = regex(r"__init__|load|resume|restore|reset|setup", re.IGNORECASE)  # what runs before the training


@dataclass(frozen=True)
class StuckWindow:
    """A test for the end of a window that stays false once it is."""

    test: ast.expr
    ends: str  # in words: when the window ends
    counter: str
    length: str


def stuck_window(script: Script, step: Event) -> StuckWindow | None:
    """The test around a step that reads a counter which only the branch of the step advances; None if there is none."""
    for place in (step.node, *reversed(step.roots)):
        window = _around(script, place)
        if window is not None:
            return window
    return None


def _around(script: Script, place: ast.AST) -> StuckWindow | None:
    """The test in the function of a node, inside a loop of that function."""
    above = list(script.above(place))
    above = above[: next((i for i, node in enumerate(above) if isinstance(node, _FUNCTIONS)), len(above))]
    outermost = next((node for node in reversed(above) if isinstance(node, _LOOPS)), None)
    for test, branch, is_true in _tests(place, above) if outermost is not None else ():
        modulo = next((n for n in ast.walk(test) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)), None)
        if (
            modulo is None
            or outermost is None
            or any(isinstance(n, ast.Call) for n in ast.walk(test))
            or constant(modulo.right) == 1
        ):
            continue
        names = {key for n in ast.walk(test) if (key := key_of(n))} - {"self"}
        counters = {key for n in ast.walk(modulo.left) if (key := key_of(n))} & names
        inside = {node for statement in branch for node in ast.walk(statement)}
        advanced = sorted(key_of(n) for n in inside if _stored(n) in counters and _is_increased(script, n))
        if not advanced:
            continue
        others = [
            n
            for n in ast.walk(script.tree)
            if (stored := _stored(n)) in names
            and n not in inside
            and (stored in counters or not _is_copied(script, n, outermost))
        ]
        if not any(_is_during(script, n, outermost) for n in others) and not _varies(names, outermost):
            return StuckWindow(
                test, f"`{text_of(test)}`" if is_true else f"not `{text_of(test)}`", advanced[0], text_of(modulo.right)
            )
    return None


def _tests(place: ast.AST, above: list[ast.AST]) -> Iterator[tuple[ast.expr, list[ast.stmt], bool]]:
    """The conditions under which a node runs, each with the statements that depend on it: a branch, or what a `continue` skips."""
    node = place
    for parent in above:
        body = getattr(parent, "body", None)
        if isinstance(parent, ast.If) and any(node is s for s in parent.body):
            yield parent.test, parent.body, True
        if isinstance(body, list) and any(node is s for s in body):
            position = next(i for i, s in enumerate(body) if s is node)
            for i, s in enumerate(body[:position]):
                if isinstance(s, ast.If) and not s.orelse and leaves_block(s.body):
                    yield s.test, body[i + 1 :], False
        node = parent


def _stored(node: ast.AST) -> str | None:
    """The variable or attribute that a node assigns."""
    return (key_of(node) or None) if isinstance(getattr(node, "ctx", None), ast.Store) else None


def _is_increased(script: Script, target: ast.AST) -> bool:
    """Whether an assignment adds to its variable: `step += 1`, `step = step + 1`."""
    statement = script.outline.parents.get(target)
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.op, ast.Add)
    value = statement.value if isinstance(statement, ast.Assign) else None
    return (
        isinstance(value, ast.BinOp)
        and isinstance(value.op, ast.Add)
        and key_of(target) in map(key_of, ast.walk(value))
    )


def _is_during(script: Script, target: ast.AST, loop: ast.AST) -> bool:
    """Whether an assignment may run in a loop: written there, or to an attribute in another method that may be called there."""
    above = list(script.above(target))
    if any(isinstance(node, ast.ExceptHandler) for node in above):
        return False  # training starts again from a checkpoint
    if loop in above:
        return True
    function = next((n for n in reversed(above) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))), None)
    is_same = function is next((n for n in script.above(loop) if isinstance(n, ast.FunctionDef)), None)
    return isinstance(target, ast.Attribute) and not is_same and not _BEFORE.search(getattr(function, "name", "load"))


def _is_copied(script: Script, target: ast.AST, loop: ast.AST) -> bool:
    """Whether an assignment gives a variable the same value in each pass of a loop: `window = args.accumulation_steps`."""
    statement = script.outline.parents.get(target)
    value = statement.value if isinstance(statement, ast.Assign) else None
    read = {key_of(n) for n in ast.walk(value)} - {""} if value is not None and key_of(value) else set()
    stored = {key_of(n) for n in ast.walk(loop) if isinstance(getattr(n, "ctx", None), ast.Store)}
    return bool(read) and not read & (stored | {"self"})


def _varies(names: set[str], loop: ast.AST) -> bool:
    """Whether a name is an attribute of something that a loop assigns, or is declared for other functions."""
    roots = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return any("." in name and name.partition(".")[0] in roots for name in names)
