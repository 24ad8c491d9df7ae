"""Losses that are multiplied by a mask of what is finite: `loss * torch.isfinite(loss)`, also through variables and conversions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, last_name_of

__all__ = ["is_zero", "masked_losses"]

_BROKEN, _FINITE = {"isnan", "isinf"}, {"isfinite"}
_LOSS = regex(r"loss", re.IGNORECASE)
_METHODS = {
    "float",
    "half",
    "int",
    "long",
    "double",
    "to",
    "type",
    "type_as",
    "detach",
    "item",
    "all",
    "any",
    "reshape",
    "view",
}
_FUNCTIONS = {"float", "int", "bool", "torch.tensor", "torch.as_tensor"}
_REPLACES = regex(r"nan_to_num|where\(|masked_fill|clamp")
_MAX_DEPTH = 4  # variables between a mask and the test


def masked_losses(script: Script) -> Iterator[tuple[ast.AST, str]]:
    """The products of a loss and a mask that is zero where it is not finite, each with the loss."""
    sites = (site for name in sorted(_BROKEN | _FINITE) for site in script.outline.calls.get(name, ()))
    products: dict[ast.AST, str] = {}
    for function in dict.fromkeys(function for _, function in sites):
        for node in ast.walk(function.node):
            for loss, mask in _products(node):
                is_loss = bool(_LOSS.search(loss)) and not _is_replaced(script, loss, function)
                if node not in products and is_loss and _is_mask(script, mask, loss, function, zero=True):
                    products[node] = loss
    yield from products.items()


def is_zero(node: ast.expr) -> bool:
    """Whether an expression is the number 0."""
    value = constant(node)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0


def _products(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The two factors of a product, in both orders, the first as a name: `loss * ok`, `loss *= ok`, `loss.mul(ok)`."""
    factors: tuple[ast.expr, ...] = ()
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = (node.left, node.right)
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        factors = (node.target, node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"mul", "mul_"}:
        factors = (node.func.value, node.args[0]) if len(node.args) == 1 else ()
    for one, other in (factors, factors[::-1]) if factors else ():
        if key_of(one):
            yield key_of(one), other


def _is_replaced(script: Script, loss: str, function: Function) -> bool:
    """Whether the function also replaces what is not finite in a loss: `loss = torch.nan_to_num(loss)`."""
    values = (b.value for b in script.outline.bindings.get(loss, ()) if b.function is function and b.value is not None)
    return any(_REPLACES.search(text_of(value)) for value in values)


def _is_mask(
    script: Script, node: ast.expr, loss: str, function: Function, *, zero: bool, depth: int = _MAX_DEPTH
) -> bool:
    """Whether an expression is zero (or not, one) where a loss is NaN or inf."""

    def is_mask(part: ast.expr, *, zero: bool = zero) -> bool:
        return _is_mask(script, part, loss, function, zero=zero, depth=depth)

    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Invert, ast.Not)):
        return is_mask(node.operand, zero=not zero)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and constant(node.left) == 1:
        return is_mask(node.right, zero=not zero)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd if zero else ast.BitOr):
        return is_mask(node.left) or is_mask(node.right)
    if isinstance(node, ast.BoolOp):
        return isinstance(node.op, ast.And if zero else ast.Or) and any(map(is_mask, node.values))
    if isinstance(node, ast.IfExp) and zero:
        return (is_zero(node.orelse) and is_mask(node.test)) or (is_zero(node.body) and is_mask(node.test, zero=False))
    if isinstance(node, ast.Call):
        return _is_call(script, node, loss, function, zero=zero, depth=depth)
    values = script.outline.values(key_of(node), function) if key_of(node) and depth else []
    return len(values) == 1 and _is_mask(script, values[0], loss, function, zero=zero, depth=depth - 1)


def _is_call(script: Script, call: ast.Call, loss: str, function: Function, *, zero: bool, depth: int) -> bool:
    """The same of a call: the test itself, or a conversion of one."""
    name = last_name_of(call.func)
    if name in (_FINITE if zero else _BROKEN):
        # `torch.isfinite(loss.detach())`, `loss.isfinite()`; a test of something else, such as the target, is another mask.
        parts = [*call.args[:1], *([call.func.value] if isinstance(call.func, ast.Attribute) and not call.args else [])]
        return any(key_of(n) == loss for part in parts for n in ast.walk(part))
    inner: ast.expr | None = None
    if isinstance(call.func, ast.Attribute) and name in _METHODS:
        inner = call.func.value
    elif key_of(call.func) in _FUNCTIONS and call.args:
        inner = call.args[0]
    return inner is not None and _is_mask(script, inner, loss, function, zero=zero, depth=depth)
