"""What a function of the file returns for arguments that are literals.

    def get_dtype(name):                       get_dtype("half")  ->  torch.float16
        if name in ("half", "fp16"):
            return torch.float16
        return torch.float32

Only tests of a parameter against literals are decided. Any other test that leads to a `return` leaves the result open.
"""

from __future__ import annotations

import ast
import copy
from functools import lru_cache

from halfstep.check.script.syntax.children import nodes_in, statements_in
from halfstep.check.script.syntax.evaluate import OPEN, chosen_case, value_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.scope import Function, default_of

__all__ = ["outcome"]

Known = dict[str, object]
_SIMPLE = (
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.Expr,
    ast.Pass,
    ast.Assert,
    ast.Import,
    ast.ImportFrom,
    ast.Delete,
)


def outcome(call: ast.Call, function: Function) -> ast.expr | None:
    """The one expression that a call of this function returns; None if the text does not decide it."""
    if isinstance(function.node, ast.AsyncFunctionDef) or any(k.arg is None for k in call.keywords):
        return None
    known = _arguments(call, function)
    result = _run(function.body, known)
    if not isinstance(result, ast.expr) or _is_generator(function):
        return None
    texts = {name: value for name, value in known.items() if isinstance(value, (str, bool))}
    reads = {n.id for n in nodes_in(result) if isinstance(n, ast.Name)} if texts else set()
    texts = {name: value for name, value in texts.items() if name in reads}
    new: ast.expr = _Known(texts).visit(copy.deepcopy(result)) if texts else result
    return new


class _Known(ast.NodeTransformer):
    """Writes the values of variables in their places."""

    def __init__(self, known: dict[str, str | bool]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.known or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(ast.Constant(self.known[node.id]), node)


@lru_cache(maxsize=64)  # a function that settings come from is called in several places
def _is_generator(function: Function) -> bool:
    return any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in nodes_in(function.node))


def _arguments(call: ast.Call, function: Function) -> Known:
    """The parameters whose values are literals in the call, or by default."""
    bound = function.method and function.params[:1] in {("self",), ("cls",)}
    params = function.params[1:] if bound else function.params
    if any(isinstance(a, ast.Starred) for a in call.args):
        return {}
    values: dict[str, ast.expr] = dict(zip(params, call.args, strict=False))
    values |= {k.arg: k.value for k in call.keywords if k.arg is not None}
    known: Known = {}
    for name in params:
        value = values.get(name) or default_of(function, name)
        if isinstance(value, ast.Constant):
            known[name] = value.value
    return known


def _run(body: list[ast.stmt], known: Known) -> object:
    """What a block returns: an expression, None if it goes on after the block, or OPEN."""
    for statement in body:
        result, is_decided = None, False
        if isinstance(statement, ast.Return):
            return statement.value if statement.value is not None else OPEN
        if isinstance(statement, ast.Raise):
            return OPEN
        if isinstance(statement, ast.If):
            test = _value(statement.test, known)
            is_decided = test is not OPEN
            if is_decided:
                result = _run(statement.body if test else statement.orelse, known)
            elif _leaves(statement):
                return OPEN
        elif isinstance(statement, ast.Match):
            is_decided = _value(statement.subject, known) is not OPEN
            result = _matched(statement, known)
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            is_decided = True
            for item in statement.items:
                known.pop(key_of(item.optional_vars) if item.optional_vars is not None else "", None)
            result = _run(statement.body, known)
        elif _leaves(statement):
            return OPEN
        if result is not None:
            return result
        if not is_decided:
            _assign(statement, known)
    return None


def _assign(statement: ast.stmt, known: Known) -> None:
    """Add what a statement assigns to the values; remove what it assigns in a way that the text does not decide."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    value = _value(statement.value, known) if isinstance(statement, ast.Assign) else OPEN
    for node in nodes_in(statement) if known else ():  # most functions have no known value, and walking them is slow
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            known.pop(node.id, None)
    if isinstance(target, ast.Name) and value is not OPEN:
        known[target.id] = value


def _matched(statement: ast.Match, known: Known) -> object:
    """What the case returns that fits the subject."""
    subject = _value(statement.subject, known)
    case = chosen_case(statement, subject, lambda leaf: _value(leaf, known)) if subject is not OPEN else None
    if case is not None:
        return _run(case.body, known) if isinstance(case, ast.match_case) else OPEN
    return None if subject is not OPEN or not _leaves(statement) else OPEN


def _leaves(statement: ast.stmt) -> bool:
    if isinstance(statement, _SIMPLE):
        return False
    return any(isinstance(n, (ast.Return, ast.Raise)) for n in statements_in(statement))


def _value(node: ast.expr, known: Known) -> object:
    """The value of a test of parameters and literals; OPEN for anything else."""
    return value_of(node, lambda leaf: known.get(leaf.id, OPEN) if isinstance(leaf, ast.Name) else OPEN)
