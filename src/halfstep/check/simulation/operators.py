"""Operators and comparisons of a simulated run."""

from __future__ import annotations

import ast
import dataclasses
import operator
from typing import Any

from halfstep.check.regex import regex
from halfstep.check.simulation.decisions import WINDOWS, Decisions
from halfstep.check.simulation.values import Env, Library, Negated, Params, Tensor, Test, Unknown, combined, is_plain

__all__ = ["Operators", "divided"]

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.BitOr: operator.or_, ast.BitAnd: operator.and_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip  # fmt: skip
_SYMBOLS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip  # fmt: skip
_INVERSE = regex(r"\(1(?:\.0)? / (.+)\)$")  # what a variable with `1 / accumulation_steps` has as its key
_ACCUMULATION = regex(r"accum|acc_|_acc|virtual|subdivision|batch_split|micro|iter_size|grad_steps|update_freq")
MAX_COUNT = 16  # a larger number counts no steps of a run
MAX_WINDOW = 4  # steps that a loop runs here
SCALE = 16  # a larger factor of a loss is no weight of a term
MAX_NUMBER = 2**63
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


class Operators(Decisions):
    """Evaluates operators."""

    def _value_BoolOp(self, node: ast.BoolOp, env: Env) -> Any:
        wanted = isinstance(node.op, ast.Or)
        for part in node.values[:-1]:
            value = self.value(part, env)
            if self.truth(value) == wanted:
                return value if wanted else (value if is_plain(value) else False)
        return self.value(node.values[-1], env)

    def _value_UnaryOp(self, node: ast.UnaryOp, env: Env) -> Any:
        value = self.value(node.operand, env)
        if isinstance(node.op, ast.Not):
            if isinstance(value, Unknown | Test | Negated | Tensor):
                return Negated(value)
            return not self.truth(value)
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        return value

    def _value_BinOp(self, node: ast.BinOp, env: Env) -> Any:
        left, right = self.value(node.left, env), self.value(node.right, env)
        if isinstance(node.op, ast.Mod):
            left = self.counter(left)
            right = self.window(right) if isinstance(left, int | float) and isinstance(right, Unknown) else right
            if isinstance(left, int) and isinstance(right, int) and 0 <= left <= MAX_COUNT and right > MAX_WINDOW:
                # A loop runs a few times here: what the script does every 32 steps happens every other one.
                right = WINDOWS[0]
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            result = combined(left, right)
            result = divided(result, node.op, right)
            is_scaled = isinstance(node.op, ast.Mult) and any(map(_may_scale, (left, right)))
            return dataclasses.replace(result, formats=result.formats | {""}) if is_scaled else result
        if isinstance(left, Params) or isinstance(right, Params):
            return Params(frozenset().union(*(side.models for side in (left, right) if isinstance(side, Params))))
        if isinstance(left, list) and isinstance(right, list) and isinstance(node.op, ast.Add):
            return left + right
        if is_plain(left) and is_plain(right):
            return self._computed(left, node.op, right)
        if all(isinstance(side, Unknown | int | float) for side in (left, right)):
            sign = _SYMBOLS.get(type(node.op), "?")
            return Unknown(f"({_key(left)} {sign} {_key(right)})")
        return Unknown(self.path.fresh("result"))

    def _computed(self, left: Any, sign: ast.operator, right: Any) -> Any:
        try:
            if isinstance(sign, ast.Mult) and not all(isinstance(side, int | float) for side in (left, right)):
                return Unknown(self.path.fresh("result"))  # a text of any length
            result = _OPERATORS[type(sign)](left, right)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            return Unknown(self.path.fresh("result"))
        too_large = isinstance(result, int) and abs(result) > MAX_NUMBER
        return Unknown(self.path.fresh("result")) if too_large else result

    def _value_Compare(self, node: ast.Compare, env: Env) -> Any:
        left, sign = self.value(node.left, env), node.ops[0]
        right = self.value(node.comparators[0], env)
        if len(node.ops) > 1:
            return Unknown(self.path.fresh("comparison"))
        if isinstance(sign, ast.In | ast.NotIn):
            result = self.contains(right, left)
            return Negated(result) if isinstance(sign, ast.NotIn) else result
        return self.compared(left, sign, right)

    def compared(self, left: Any, sign: ast.cmpop, right: Any) -> Any:
        """The outcome of a comparison."""
        if is_plain(left) and is_plain(right):
            try:
                return _OPERATORS[type(sign)](left, right)
            except (KeyError, TypeError):
                return Unknown(self.path.fresh("comparison"))
        if isinstance(left, Library) and isinstance(right, Library):
            same = left == right
            return same if isinstance(sign, ast.Eq | ast.Is) else not same
        if not isinstance(left, Unknown) and isinstance(right, Unknown):
            left, right, is_mirrored = right, left, True
        else:
            is_mirrored = False
        if (
            isinstance(left, Unknown)
            and isinstance(right, bool)
            and isinstance(sign, ast.Eq | ast.NotEq | ast.Is | ast.IsNot)
        ):
            return left if isinstance(sign, ast.Eq | ast.Is) == right else Negated(left)
        if isinstance(left, Unknown) and (is_plain(right) or isinstance(right, Library)):
            if isinstance(sign, ast.Eq | ast.Is | ast.NotEq | ast.IsNot):
                name = "is" if right is None else "=="
                test = Test(left.key, name, right)
                return test if isinstance(sign, ast.Eq | ast.Is) else Negated(test)
            symbol = _SYMBOLS[type(sign)]
            return Test(left.key, _MIRRORED[symbol] if is_mirrored else symbol, right)
        if isinstance(left, Unknown) and isinstance(right, Unknown):
            if left == right and isinstance(sign, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
                return isinstance(sign, ast.Eq | ast.Is)  # `x != x` is a test for NaN
            if isinstance(sign, ast.NotEq | ast.IsNot):
                return Negated(Unknown(f"{left.key} == {right.key}"))
            return Unknown(f"{left.key} {_SYMBOLS.get(type(sign), '==')} {right.key}")
        if isinstance(sign, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) and (left is None or right is None):
            return isinstance(sign, ast.IsNot | ast.NotEq)  # an object of ours is not None
        return Unknown(self.path.fresh("comparison"))

    def contains(self, container: Any, item: Any) -> Any:
        """Whether something is in a container."""
        if is_plain(container) and is_plain(item):
            try:
                return item in container
            except TypeError:
                return Unknown(self.path.fresh("membership"))
        if isinstance(item, Library) and isinstance(container, list | tuple):
            return item in container
        if isinstance(container, dict) and is_plain(item):
            return item in container
        if isinstance(item, Unknown) and isinstance(container, list | tuple) and is_plain(container):
            return any(self.truth(Test(item.key, "==", each), 1) for each in container)
        if isinstance(item, str) and isinstance(container, Unknown):
            return Unknown(f"{item!r} in {container.key}")
        return Unknown(self.path.fresh("membership"))


def divided(tensor: Tensor, sign: ast.operator, divisor: Any) -> Tensor:
    """A quotient, which notes by which number of micro-batches it was divided, and whether that is the second time."""
    if not isinstance(divisor, Unknown):
        return tensor
    key = divisor.key if isinstance(sign, ast.Div) else ""
    if isinstance(sign, ast.Mult) and (inverse := _INVERSE.match(divisor.key)):
        key = inverse[1]
    if not _ACCUMULATION.search(key):
        return tensor
    twice = key if key in tensor.divisors else tensor.divided_twice
    return dataclasses.replace(tensor, divisors=tensor.divisors | {key}, divided_twice=twice)


def _key(value: Any) -> str:
    return value.key if isinstance(value, Unknown) else repr(value)


def _may_scale(value: Any) -> bool:
    """Whether a factor may be a loss scale of the script's own."""
    return (isinstance(value, int | float) and value >= SCALE) or (isinstance(value, Unknown) and "scale" in value.key)
