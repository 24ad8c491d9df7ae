"""What a function of the file returns for arguments that are literals.

    def get_dtype(name):                       get_dtype("half")  ->  torch.float16
        if name in ("half", "fp16"):
            return torch.float16
        return torch.float32

Only tests of a parameter against literals are decided. Any other test that leads to a `return` leaves the result open.
"""

from __future__ import annotations

import ast
from functools import lru_cache

from halfstep.check.script.syntax.children import statements_in
from halfstep.check.script.syntax.evaluate import OPEN, chosen_case, value_of
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
    if not isinstance(_run(function.body, known), ast.expr):  # the parameters that it assigns can only leave more open
        return None
    stored, is_generator = _written_in(function)
    if is_generator:
        return None
    result = _run(function.body, {name: value for name, value in known.items() if name not in stored})
    return result if isinstance(result, ast.expr) else None


@lru_cache(maxsize=64)  # a function that settings come from is called in several places
def _written_in(function: Function) -> tuple[frozenset[str], bool]:
    """The names that a function assigns, and whether it is a generator."""
    nodes = list(ast.walk(function.node))
    stored = frozenset(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return stored, any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in nodes)


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
        result: object = None
        if isinstance(statement, ast.Return):
            return statement.value if statement.value is not None else OPEN
        if isinstance(statement, ast.Raise):
            return OPEN
        if isinstance(statement, ast.If):
            test = _value(statement.test, known)
            if test is not OPEN:
                result = _run(statement.body if test else statement.orelse, known)
            elif _leaves(statement):
                return OPEN
        elif isinstance(statement, ast.Match):
            result = _matched(statement, known)
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            result = _run(statement.body, known)
        elif _leaves(statement):
            return OPEN
        if result is not None:
            return result
    return None


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
