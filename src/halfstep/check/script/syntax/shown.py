"""Settings that a script only prints: a flag that nothing but a message depends on has no effect on the run."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Outline, last_name_of

__all__ = ["SHOWS", "is_message", "is_only_shown", "only_reaches_messages", "shows_only"]

# Functions that print, log or describe what they receive.
SHOWS = frozenset({
    "print", "pprint", "info", "debug", "warning", "warn", "error", "log", "write", "add_text", "rule", "secho", "echo", "rank_zero_info",
    "print_rank_0", "print_rank0", "exception", "critical", "success", "print0", "log_info", "log_message",
})  # fmt: skip
# Functions that record the settings of a run next to its results; `wandb.init(config=...)` is one by its keyword.
_RECORDS = frozenset({"log_hyperparams", "log_params", "log_param", "log_config", "init_trackers", "add_hparams"})
_PASSES_ON = (ast.keyword, ast.FormattedValue, ast.JoinedStr, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.BinOp)
_PLAIN = {"int", "float", "str", "max", "min", "len"}
_TEXT = {"str", "repr", "format", "bool", "upper", "lower", "join"}


def is_only_shown(outline: Outline, node: ast.expr) -> bool:
    """Whether a value is part of a message, or decides which message is printed."""
    return is_message(outline.parents, node)


def is_message(parents: Mapping[ast.AST, ast.AST], node: ast.expr) -> bool:
    """The same of a value in a tree of which these are the parents; what a logger stores with the run is a message too."""
    key, part = key_of(node), parents.get(node)
    child: ast.AST = node
    in_table = False
    while part is not None and not isinstance(part, ast.stmt):
        if isinstance(part, ast.Call):
            name = last_name_of(part.func)
            is_config = name == "init" and isinstance(child, ast.keyword) and child.arg == "config"
            if (name in SHOWS or name in _RECORDS or is_config) and child is not part.func:
                return True
            if name not in _TEXT or in_table:
                return False
        elif isinstance(part, ast.Dict | ast.DictComp | ast.List | ast.Tuple):
            in_table = True
        elif isinstance(part, ast.Attribute):
            if part.attr not in _TEXT:
                return False
        elif not isinstance(part, _PASSES_ON) and not isinstance(part, ast.IfExp):
            return False
        child, part = part, parents.get(part)
    if in_table or not isinstance(part, ast.If) or part.test is not child:
        return False
    return shows_only([*part.body, *part.orelse], key)


def only_reaches_messages(parents: Mapping[ast.AST, ast.AST], scope: ast.AST, node: ast.expr, depth: int = 2) -> bool:
    """Whether a value is part of messages alone, also through variables of a function: `total = batch * accum; print(total)`."""
    if is_message(parents, node):
        return True
    part, child = parents.get(node), node
    while isinstance(part, ast.BinOp | ast.UnaryOp | ast.Call | ast.JoinedStr | ast.FormattedValue | ast.IfExp):
        if isinstance(part, ast.Call) and (last_name_of(part.func) not in _PLAIN or child is part.func):
            return False
        child, part = part, parents.get(part)
    target = part.targets[0] if isinstance(part, ast.Assign) and len(part.targets) == 1 else None
    if not isinstance(target, ast.Name) or not depth:
        return False
    loads = [
        n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == target.id and isinstance(n.ctx, ast.Load)
    ]
    return bool(loads) and all(only_reaches_messages(parents, scope, load, depth - 1) for load in loads)


def shows_only(body: list[ast.stmt], flag: str = "") -> bool:
    """Whether statements only print, or set the flag itself to a constant."""
    return all(_shows(statement, flag) for statement in body)


def _shows(statement: ast.stmt, flag: str) -> bool:
    if isinstance(statement, ast.If):
        return shows_only([*statement.body, *statement.orelse], flag)
    if isinstance(statement, ast.Assign):
        is_constant = isinstance(statement.value, ast.Constant)
        return bool(flag) and is_constant and [key_of(target) for target in statement.targets] == [flag]
    if isinstance(statement, ast.Expr):
        value = statement.value
        return isinstance(value, ast.Constant) or (isinstance(value, ast.Call) and last_name_of(value.func) in SHOWS)
    return isinstance(statement, (ast.Pass, ast.Continue))
