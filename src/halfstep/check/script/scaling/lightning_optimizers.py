"""Which optimizers a Lightning module gets: those of `self.optimizers()`, which unscale gradients, or torch's own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Literal

from halfstep.check.regex import regex
from halfstep.check.script.objects.choices import constant, text_of
from halfstep.check.script.objects.expressions import options_of
from halfstep.check.script.objects.values import argument
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function, Outline

__all__ = ["Wrapped", "names_optimizer", "wrapping_of"]

MAX_DEPTH = 5
Wrapped = Literal["wrapped", "raw", ""]  # Lightning's optimizer, torch's, or neither
_OWN = "self.optimizers"
_MODULES = {"optimizers", "manual_backward"}  # what only a Lightning module calls
_RAW = regex(r"^(self\.)?_?trainer\.(strategy\.)?optimizers$")
_PASSES_ON = {"list", "tuple", "enumerate", "reversed", "zip", "iter", "next"}


def names_optimizer(outline: Outline, key: str, function: Function) -> bool:
    """Whether a variable is an optimizer that Lightning returns, also one of several: `_, opt_d = self.optimizers()`."""
    if not _MODULES & outline.calls.keys():
        return False
    return wrapping_of(outline, ast.parse(key, mode="eval").body, function) != ""


def wrapping_of(outline: Outline, value: ast.expr | None, function: Function, depth: int = MAX_DEPTH) -> Wrapped:
    """What an expression is that names an optimizer of Lightning, or a list of them; "" where the text does not decide."""
    if value is None or not depth:
        return ""
    if isinstance(value, ast.Subscript):
        return wrapping_of(outline, value.value, function, depth)
    if isinstance(value, (ast.IfExp, ast.BoolOp, ast.List, ast.Tuple)):
        parts = value.elts if isinstance(value, (ast.List, ast.Tuple)) else options_of(value)
        return _common(wrapping_of(outline, part, function, depth - 1) for part in parts)
    if isinstance(value, ast.Call):
        return _of_call(outline, value, function, depth)
    text = text_of(value) if isinstance(value, ast.Attribute) else ""
    if _RAW.search(text):
        return "raw"
    if isinstance(value, ast.Attribute) and value.attr in {"optimizer", "_optimizer"}:
        # `opt.optimizer`: the torch optimizer in one of Lightning's.
        return "raw" if wrapping_of(outline, value.value, function, depth - 1) == "wrapped" else ""
    return _of_variable(outline, key_of(value), function, depth)


def _of_call(outline: Outline, call: ast.Call, function: Function, depth: int) -> Wrapped:
    """What `self.optimizers()` returns, also through `list(...)` and through a method of this file."""
    name = text_of(call.func)
    if name == _OWN:
        option = constant(argument(call, 0, "use_pl_optimizer"))
        has_option = bool(call.args or call.keywords)
        return "raw" if option is False else "wrapped" if option is True or not has_option else ""
    if name in _PASSES_ON:
        return _common(wrapping_of(outline, part, function, depth - 1) for part in call.args[:1])
    target = outline.call_target(call, function)
    nodes = ast.walk(target.node) if target is not None and target.name != "__init__" else ()
    returned = [n.value for n in nodes if isinstance(n, ast.Return)]
    return _common(wrapping_of(outline, part, target, depth - 1) for part in returned) if target is not None else ""


def _of_variable(outline: Outline, key: str, function: Function, depth: int) -> Wrapped:
    """What a variable of a function is, also the target of a loop, and a parameter that every call of the file passes."""
    if not key.isidentifier() and not key.startswith("self."):
        return ""
    bound = outline.lookup(key, function)[:MAX_BINDINGS]
    if key in function.params and not any(b.function is function for b in bound):
        passed = outline.passed(key, function)
        return _common(wrapping_of(outline, part, origin, depth - 1) for part, origin in passed)
    return _common(
        wrapping_of(outline, b.value if b.value is not None else getattr(b.node, "iter", None), b.function, depth - 1)
        for b in bound
    )


def _common(kinds: Iterator[Wrapped]) -> Wrapped:
    """The kind that all parts have; "" if they differ."""
    every = set(kinds)
    return every.pop() if len(every) == 1 else ""
