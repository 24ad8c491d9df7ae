"""Which calls of a script train with a Trainer or Fabric that it creates."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from halfstep.check.script.syntax.names import Names, chain

__all__ = ["TRAINS", "facts_around"]

TRAINS = frozenset({".fit()", ".backward()"})
_INFERS = frozenset({"predict", "test", "validate"})


def facts_around(
    call: ast.Call, facts: frozenset[str], calls: Sequence[ast.Call], nodes: Sequence[ast.AST], names: Names
) -> frozenset[str]:
    """A script's facts, without training that a Trainer has no part in.

    Where several functions each create one, as tests do, only the training of this function counts. `clf.fit(x, y)` of a
    script that calls `trainer.predict(model)` alone fits another object.
    """
    if not TRAINS & facts:
        return facts
    if _only_infers(call, calls, nodes):
        facts -= {".fit()"}
    if len([c for c in calls if names.full(c.func) == names.full(call.func)]) == 1:
        return facts
    for node in nodes:  # outer functions come first
        if isinstance(node, ast.FunctionDef) and node.lineno <= call.lineno <= (node.end_lineno or 0):
            inside = {f".{n.attr}()" for n in ast.walk(node) if isinstance(n, ast.Attribute)}
            return (facts - TRAINS) | (TRAINS & facts & inside)
    return facts


def _only_infers(call: ast.Call, calls: Sequence[ast.Call], nodes: Sequence[ast.AST]) -> bool:
    """Whether the script calls methods of inference of the variable that a call is assigned to, and `fit` of others only."""
    targets = [t for n in nodes if isinstance(n, ast.Assign) and n.value is call for t in n.targets]
    variables = {name[-1] for target in targets if (name := chain(target))}
    funcs = [c.func for c in calls if isinstance(c.func, ast.Attribute)]
    methods = {func.attr for func in funcs if variables.intersection(chain(func.value)[-1:])}
    return bool(methods & _INFERS) and "fit" not in methods
