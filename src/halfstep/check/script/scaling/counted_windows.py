"""Windows that a counter of micro-batches ends: `num_pending == 4`, in whose branch the counter is set to zero again."""

from __future__ import annotations

import ast

from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["ends_counted_window"]


def ends_counted_window(script: Script, event: Event) -> bool:
    """Whether an event is in a branch that a counter reaches, and which starts the counter again."""
    for block in script.above(event.node):
        test = block.test if isinstance(block, ast.If) else None
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.Eq, ast.GtE)):
            continue
        assert isinstance(block, ast.If)
        counter = key_of(test.left)
        is_reset = any(
            isinstance(s, ast.Assign) and constant(s.value) == 0 and counter in map(key_of, s.targets)
            for s in block.body
        )
        if counter and is_reset and any(_counts(node, counter) for node in ast.walk(event.function.node)):
            return True
    return False


def _counts(node: ast.AST, counter: str) -> bool:
    return isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and key_of(node.target) == counter
