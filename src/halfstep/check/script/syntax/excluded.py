"""Values that a setting cannot have, because the file rejects them.

    if args.precision == "16-mixed":
        raise SystemExit("...")

The choices of an option on the command line do the same, and so does a table without the value: `{"bf16": torch.bfloat16}[precision]`.
A function that returns for a value, and a branch for others, exclude it from what follows or is in them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from halfstep.check.script.syntax.children import blocks_of
from halfstep.check.script.syntax.evaluate import OPEN, value_of
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.settled import setting_name

__all__ = ["is_excluded", "is_never_equal", "is_rejection"]

_EXITS = {"exit", "_exit", "error", "abort"}  # sys.exit(...), parser.error(...)


def is_excluded(
    outline: Outline, setting: ast.expr, spellings: Collection[str], around: Iterable[ast.AST] = ()
) -> bool:
    """Whether a file rejects one value of a setting such as `args.precision`, under any of its spellings.

    Settings are compared by their last names: `args.precision` is `precision` in the function that parses the options. With the
    nodes `around` which the value matters, also where their function has returned, or does not run these branches.
    """
    name = setting_name(setting)
    if not name:
        return False
    for call, _ in outline.calls.get("add_argument", ()):
        flags = [str(a.value).lstrip("-").replace("-", "_") for a in call.args if isinstance(a, ast.Constant)]
        choices = next((_strings(k.value) for k in call.keywords if k.arg == "choices"), None)
        if name in flags and choices is not None and choices.isdisjoint(spellings):
            return True
    values = _Values(outline, name, spellings)
    stopping = (node for node in outline.parents if values.are_stopped(node, is_rejection))
    return any(not values.pass_by(node) for node in stopping) or any(map(values.miss, around))


@dataclass(frozen=True)
class _Values:
    """The spellings of one value of a setting, and what they do to tests."""

    outline: Outline
    name: str
    spellings: Collection[str]

    def miss(self, node: ast.AST) -> bool:
        """Whether a node does not run with the value: it is in another branch, or its function has left before it."""
        if self.pass_by(node):
            return True
        for child, parent in self._above(node):
            for block in blocks_of(parent):
                index = next((i for i, statement in enumerate(block) if statement is child), 0)
                if any(self.are_stopped(statement, _leaves) for statement in block[:index]):
                    return True
        return False

    def pass_by(self, node: ast.AST) -> bool:
        """Whether a node is in a branch that the value does not take."""
        for child, parent in self._above(node):
            if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test:
                body = parent.body if isinstance(parent.body, list) else [parent.body]
                if self._decide(parent.test, is_true=not any(child is part for part in body)):
                    return True
        return False

    def _above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """A node and what is around it inside its function, each with its parent."""
        parent = self.outline.parents.get(node)
        while parent is not None and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node, parent
            node, parent = parent, self.outline.parents.get(parent)

    def are_stopped(self, statement: ast.AST, stops: Callable[[ast.stmt], bool]) -> bool:
        """Whether a statement is an assertion that fails, or an `if` whose branch for the value stops."""
        if isinstance(statement, ast.Assert):
            return self._decide(statement.test, is_true=False)
        if not isinstance(statement, ast.If):
            return False
        branches = ((statement.body, True), (statement.orelse, False))
        stopped = [is_true for b, is_true in branches if b and (stops(b[-1]) or self.are_stopped(b[-1], stops))]
        return any(self._decide(statement.test, is_true=is_true) for is_true in stopped)

    def _decide(self, test: ast.expr, *, is_true: bool) -> bool:
        """Whether a test has an outcome for the value: for each spelling that it names, or for all if it names none."""
        parts = list(ast.walk(test))
        if not any(isinstance(n, ast.expr) and setting_name(n) == self.name for n in parts):
            return False
        strings = {n.value for n in parts if isinstance(n, ast.Constant)}
        strings |= {s for n in parts if isinstance(n, ast.Name) for s in self._named(n)}
        named = [s for s in self.spellings if s in strings] or self.spellings
        outcomes = [value_of(test, functools.partial(self._leaf, value)) for value in named]
        return all(outcome is not OPEN and bool(outcome) is is_true for outcome in outcomes)

    def _leaf(self, value: str, node: ast.expr) -> object:
        if setting_name(node) == self.name:
            return value
        return self._named(node) or OPEN if isinstance(node, ast.Name) else OPEN

    def _named(self, node: ast.Name) -> tuple[str, ...]:
        """The strings of a constant of the file: `ALLOWED = ("bf16", "fp16")`, or the keys of a table."""
        bound = self.outline.bindings.get(node.id, ())
        value = bound[0].value if len(bound) == 1 and bound[0].index is None else None
        if isinstance(value, ast.Dict):
            keys = [k.value for k in value.keys if isinstance(k, ast.Constant)]
            return tuple(map(str, keys)) if len(keys) == len(value.keys) else ()
        return tuple(_strings(value) or ())


def _leaves(statement: ast.stmt) -> bool:
    return is_rejection(statement) or isinstance(statement, (ast.Return, ast.Continue, ast.Break))


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
