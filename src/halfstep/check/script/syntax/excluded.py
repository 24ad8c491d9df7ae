"""Values that a setting cannot have, because the file rejects them.

    if args.precision == "16-mixed":
        raise SystemExit("...")

The choices of an option on the command line do the same, and so does a table without the value: `{"bf16": torch.bfloat16}[precision]`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["is_excluded", "is_never_equal", "is_rejection"]

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


def is_never_equal(outline: Outline, test: ast.expr, function: Function) -> bool:
    """Whether a test is `setting == value`, and the same function looks the setting up in a table that lacks the value."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    setting, value = key_of(test.left), test.comparators[0]
    if not setting or not isinstance(value, ast.Constant):
        return False
    for node in (n for n in ast.walk(function.node) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Load)):
        table = _table(outline, node.value) if key_of(node.slice) == setting else None
        keys = {key.value for key in table.keys if isinstance(key, ast.Constant)} if table is not None else set()
        if table is not None and len(keys) == len(table.keys) and value.value not in keys:
            return _is_always_run(outline, node)
    return False


def _table(outline: Outline, node: ast.expr) -> ast.Dict | None:
    """A dictionary that is written in place, or that nothing but one assignment of the file fills."""
    if isinstance(node, ast.Name):
        bound = outline.bindings.get(node.id, ())
        is_filled = any(key.startswith(f"{node.id}[") for key in outline.bindings)
        value = bound[0].value if len(bound) == 1 and bound[0].index is None and not is_filled else None
        return value if isinstance(value, ast.Dict) else None
    return node if isinstance(node, ast.Dict) else None


def _is_always_run(outline: Outline, node: ast.AST) -> bool:
    """Whether an expression runs whenever its function does, and what it raises ends the run."""
    parent = outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        if isinstance(parent, (ast.If, ast.IfExp, ast.BoolOp, ast.Try, ast.Lambda, ast.For, ast.While, ast.Match)):
            return False
        parent = outline.parents.get(parent)
    return True


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
