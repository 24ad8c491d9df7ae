"""The value of an expression of literals: comparisons, `and`, `or`, `not`, conditional expressions, the case and the parts of strings.

Whatever else it contains is up to the caller, who passes a function for it: the value of a parameter, of a setting, of a
variable that is assigned once.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

__all__ = ["OPEN", "chosen_case", "value_of"]

OPEN = object()  # the text does not decide it
_CASES: dict[str, Callable[[str], str]] = {"lower": str.lower, "upper": str.upper, "strip": str.strip}
_ENDS: dict[str, Callable[..., bool]] = {"startswith": str.startswith, "endswith": str.endswith}
_CASTS: dict[str, Callable[[object], object]] = {"str": str, "bool": bool}


def value_of(node: ast.expr, leaf: Callable[[ast.expr], object]) -> object:
    """The value of an expression, or OPEN; `leaf` has the values of names, attributes, entries and calls."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        values = [value_of(element, leaf) for element in node.elts]
        return OPEN if OPEN in values else tuple(values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = value_of(node.operand, leaf)
        return OPEN if value is OPEN else not value
    if isinstance(node, ast.BoolOp):
        return _joined([value_of(part, leaf) for part in node.values], isinstance(node.op, ast.Or))
    if isinstance(node, ast.IfExp):
        test = value_of(node.test, leaf)
        return OPEN if test is OPEN else value_of(node.body if test else node.orelse, leaf)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compared(node.ops[0], value_of(node.left, leaf), value_of(node.comparators[0], leaf))
    if isinstance(node, ast.JoinedStr):
        parts = [value_of(part, leaf) for part in node.values]
        return OPEN if OPEN in parts else "".join(map(str, parts))
    if isinstance(node, ast.FormattedValue) and node.conversion == -1 and node.format_spec is None:
        return value_of(node.value, leaf)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = value_of(node.left, leaf), value_of(node.right, leaf)
        return left + right if isinstance(left, str) and isinstance(right, str) else leaf(node)
    value = _called(node, leaf) if isinstance(node, ast.Call) and not node.keywords else OPEN
    return leaf(node) if value is OPEN else value


def chosen_case(statement: ast.Match, subject: object, leaf: Callable[[ast.expr], object]) -> object:
    """The case of a `match` that fits a value; None if none does, OPEN if the text does not decide it."""
    for case in statement.cases:
        options = case.pattern.patterns if isinstance(case.pattern, ast.MatchOr) else [case.pattern]
        values = [value_of(o.value, leaf) if isinstance(o, ast.MatchValue) else OPEN for o in options]
        is_wildcard = isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
        if case.guard is not None or (OPEN in values and not is_wildcard):
            return OPEN
        if is_wildcard or subject in values:
            return case
    return None


def _joined(values: list[object], decisive: bool) -> object:
    """What `or` (`decisive` is true) or `and` returns: one of its operands."""
    first = next((value for value in values if value is OPEN or bool(value) is decisive), values[-1])
    is_flag = first is OPEN and any(
        value is decisive for value in values
    )  # whatever comes before is true or false, too
    return decisive if is_flag else first


def _called(call: ast.Call, leaf: Callable[[ast.expr], object]) -> object:
    """What a method of a string returns, or `str` and `bool`."""
    func = call.func
    if isinstance(func, ast.Name) and func.id in _CASTS and len(call.args) == 1:
        value = value_of(call.args[0], leaf)
        return OPEN if value is OPEN else _CASTS[func.id](value)
    if not isinstance(func, ast.Attribute) or (func.attr not in _CASES and func.attr not in _ENDS):
        return OPEN
    value = value_of(func.value, leaf)
    if not isinstance(value, str):
        return OPEN
    if func.attr in _CASES:
        return _CASES[func.attr](value) if not call.args else OPEN
    part = value_of(call.args[0], leaf) if len(call.args) == 1 else OPEN
    is_text = isinstance(part, str) or (isinstance(part, tuple) and all(isinstance(p, str) for p in part))
    return _ENDS[func.attr](value, part) if is_text else OPEN


def _compared(op: ast.cmpop, left: object, right: object) -> object:
    if left is OPEN or right is OPEN:
        return OPEN
    if isinstance(op, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)):
        return (left == right) is isinstance(op, (ast.Eq, ast.Is))
    if isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, (tuple, str)):
        is_text = isinstance(right, str) and not isinstance(left, str)
        return OPEN if is_text else (left in right) is isinstance(op, ast.In)
    return OPEN
