"""Losses: those that autocast forbids, and those that may carry a loss scale."""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.objects.expressions import entries_of, hand_scaled, scale_names
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["BCE", "bce_of", "may_be_scaled"]

BCE = {"torch.nn.functional.binary_cross_entropy", "torch.binary_cross_entropy"}

_CRITERION = regex(r"crit|loss|bce|objective|cost|adversarial", re.IGNORECASE)


def bce_of(outline: Outline, func: ast.expr, function: Function) -> str:
    """Whether a called object is a BCELoss: yes, maybe (on one path of this function or class), or "" if not."""
    options: list[ast.expr] = [func] if isinstance(func, ast.Call) else []
    key = key_of(func)
    if key and (_CRITERION.search(key) or "BCELoss" in outline.loads):
        options = [o for value in outline.values(key, function) for o in entries_of(value, outline, function)]
    if not options and isinstance(func, ast.Subscript):
        options = [o for o in entries_of(func, outline, function) if o is not func]
    options = [o for option in options for o in _returned(outline, option, function)]
    calls = [o for o in options if isinstance(o, ast.Call) or outline.names.full(o)]
    created = [o for o in calls if _is_bce(outline, o)]
    if not created:
        return ""
    if len(created) == len(options):
        return "yes"
    is_own = key not in function.params and ("." not in key or key in outline.bindings)
    return "maybe" if is_own and len(calls) == len(options) else ""


def _returned(outline: Outline, node: ast.expr, function: Function) -> list[ast.expr]:
    """The losses that a function of this file returns: `get_loss(name)`; any other expression as it is."""
    target = outline.call_target(node, function) if isinstance(node, ast.Call) else None
    if target is None or target.cls or not isinstance(target.node, ast.FunctionDef):
        return [node]
    returned = [n.value for n in ast.walk(target.node) if isinstance(n, ast.Return) and n.value is not None]
    return returned or [node]


def _is_bce(outline: Outline, node: ast.expr) -> bool:
    """Whether an expression creates a BCELoss, or is the function."""
    return _creates_bce(outline, node) if isinstance(node, ast.Call) else outline.names.full(node) in BCE


def _creates_bce(outline: Outline, call: ast.Call) -> bool:
    while (
        isinstance(call.func, ast.Attribute)
        and call.func.attr in {"cuda", "to"}
        and isinstance(call.func.value, ast.Call)
    ):
        call = call.func.value
    return outline.names.full(call.func) in {"torch.nn.BCELoss", "torch.nn.modules.loss.BCELoss"}


def may_be_scaled(outline: Outline, loss: ast.expr, function: Function) -> bool:
    """Whether a loss may carry a scale by its name; `scaled_loss = loss / accum_steps` shows that it does not."""
    if not hand_scaled(loss):
        return False
    key = key_of(loss)
    bound = [b for b in outline.lookup(key, function) if b.function is function] if key.isidentifier() else []
    return not bound or not all(b.index is None and _is_arithmetic(b.value, key) for b in bound)


def _is_arithmetic(value: ast.expr | None, key: str) -> bool:
    """Whether a value only copies, divides or weights variables none of which, besides `key` itself, may be a scale."""
    if not isinstance(value, (ast.BinOp, ast.Name, ast.Attribute)) or any(
        "scale" in name for name in scale_names(value) if name != key
    ):
        return False
    calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)]
    names = (c.func.attr if isinstance(c.func, ast.Attribute) else key_of(c.func) for c in calls)
    return all(name in {"mean", "sum", "float", "int", "max", "len"} for name in names)
