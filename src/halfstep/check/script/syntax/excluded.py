"""Values that a setting cannot have, because the file rejects them.

    if args.precision == "16-mixed":
        raise SystemExit("...")

The choices of an option on the command line do the same.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Outline

__all__ = ["is_excluded", "is_rejection"]

_EXITS = {"exit", "_exit", "error", "abort"}  # sys.exit(...), parser.error(...)


def is_excluded(outline: Outline, setting: ast.expr, spellings: Collection[str]) -> bool:
    """Whether a file rejects one value of a setting such as `args.precision`, under any of its spellings.

    Settings are compared by their last names: `args.precision` is `precision` in the function that parses the options.
    """
    name = _last_name(setting)
    if not name:
        return False
    for call, _ in outline.calls.get("add_argument", ()):
        flags = [str(a.value).lstrip("-").replace("-", "_") for a in call.args if isinstance(a, ast.Constant)]
        choices = next((_strings(k.value) for k in call.keywords if k.arg == "choices"), None)
        if name in flags and choices is not None and choices.isdisjoint(spellings):
            return True
    return any(_rejects(node, name, spellings) for node in outline.parents if isinstance(node, ast.If))


def _rejects(node: ast.If, name: str, spellings: Collection[str]) -> bool:
    """Whether the body of an `if` raises, and runs for a value."""
    test = node.test
    if (
        not isinstance(test, ast.Compare)
        or len(test.ops) != 1
        or _last_name(test.left) != name
        or not is_rejection(node.body[-1])
    ):
        return False
    operator, right = test.ops[0], test.comparators[0]
    if isinstance(operator, ast.Eq):
        return isinstance(right, ast.Constant) and str(right.value) in spellings
    strings = _strings(right)
    if strings is None or not isinstance(operator, (ast.In, ast.NotIn)):
        return False
    return strings.isdisjoint(spellings) == isinstance(operator, ast.NotIn)


def is_rejection(statement: ast.stmt) -> bool:
    """Whether a statement raises, or ends the program."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(statement, ast.Raise) or (isinstance(call, ast.Call) and _last_name(call.func) in _EXITS)


def _strings(node: ast.expr | None) -> set[str] | None:
    """The strings of a literal list, tuple or set; None for anything else."""
    if not isinstance(node, (ast.List, ast.Tuple, ast.Set)) or not all(isinstance(e, ast.Constant) for e in node.elts):
        return None
    return {str(e.value) for e in node.elts if isinstance(e, ast.Constant)}


def _last_name(node: ast.expr) -> str:
    return last_name(key_of(node))
