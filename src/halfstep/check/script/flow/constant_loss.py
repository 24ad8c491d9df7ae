"""Losses that one branch replaces by a new tensor, which no parameter has a part in: `loss = torch.tensor(0.0, requires_grad=True)`."""

from __future__ import annotations

import ast
from typing import NamedTuple

from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.expressions import options_of
from halfstep.check.script.objects.values import constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["Choice", "constant_loss"]

_NEW = {"torch.tensor", "torch.zeros", "torch.ones", "torch.full"}
_MOVES = {"to", "cuda", "requires_grad_", "float"}


class Choice(NamedTuple):
    """The new tensor that a loss is in one branch, and the condition of that branch."""

    value: ast.expr
    test: ast.expr


def constant_loss(script: Script, back: Event) -> Choice | None:
    """The new tensor on which a backward may run: a branch assigns it, the other the real loss, and nothing is added after."""
    call = back.node
    receiver = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
    if isinstance(receiver, ast.Call) and back.scaled == "yes" and receiver.args:
        receiver = receiver.args[0]  # scaler.scale(loss)
    loss = key_of(receiver)
    nodes = list(ast.walk(back.function.node)) if loss else []
    line = getattr(call, "lineno", 0)
    for branch in (n for n in nodes if isinstance(n, ast.If) and n.lineno < line):
        sides = [[v for s in side for v in _assigned(s, loss)] for side in (branch.body, branch.orelse)]
        new = [[v for v in values if all(_is_new(script, o) for o in options_of(v))] for values in sides]
        one = next((i for i in (0, 1) if new[i] and len(new[i]) == len(sides[i])), None)
        if one is None or not sides[1 - one] or new[1 - one] or call in ast.walk(branch):
            continue
        # Both branches are before the backward, and nothing is assigned between them and it.
        end = branch.end_lineno or line
        after = [v for n in nodes if end < getattr(n, "lineno", 0) <= line for v in _assigned(n, loss)]
        if not after and _block(script, branch) in script.above(call):
            return Choice(new[one][0], branch.test)
    return None


def _block(script: Script, branch: ast.If) -> ast.AST:
    """What contains a test: the loop, the branch or the function; a region counts as a part of that."""
    return next((n for n in script.above(branch) if not isinstance(n, ast.With)), script.tree)


def _assigned(node: ast.AST, key: str) -> list[ast.expr]:
    """The values that a statement, with those inside it, assigns to a variable."""
    parts = [part for part in ast.walk(node) if isinstance(part, (ast.Assign, ast.AugAssign))]
    pairs = [(t, p.value) for p in parts for t in (p.targets if isinstance(p, ast.Assign) else [p.target])]
    return [value for target, value in pairs if key_of(target) == key]


def _is_new(script: Script, value: ast.expr) -> bool:
    """Whether an expression is a tensor that is created here and asks for a gradient."""
    asks = False
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _MOVES:
        asks = asks or value.func.attr == "requires_grad_"
        value = value.func.value
    if not isinstance(value, ast.Call) or script.outline.names.full(value.func) not in _NEW:
        return False
    if any(constant(argument) is ... for argument in value.args[:1]):
        return False
    return asks or any(k.arg == "requires_grad" and constant(k.value) is True for k in value.keywords)
