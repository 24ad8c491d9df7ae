"""HS602: a scaler class of the script's own whose `unscale_` does nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_statements

__all__ = ["RULES"]

_CLASS = """\
import torch

class LossScaler:
    def __init__(self, scale=65536.0):
        self.scale_factor = scale

    def scale(self, loss):
        return loss * self.scale_factor

    def unscale_(self, optimizer):
        {unscale}

    def step(self, optimizer):
        {step}
        optimizer.step()
"""
_DIVIDE = "for group in optimizer.param_groups:\n            for p in group['params']:\n                p.grad.div_(self.scale_factor)"


class UnscaleDoesNothing(ScriptRule):
    """A scaler class multiplies the loss, and its `unscale_` does nothing."""

    code = "HS602"
    name = "unscale-does-nothing"
    severity = "warning"
    reason = (
        "`unscale_` is what training code calls before it clips or logs gradients. In a class of the script's own whose `unscale_` is empty "
        "and whose `step` divides the gradients, everything between the two works on gradients times the scale: clipping to a norm of 1.0 "
        "with a scale of 65536 clips every step to 1.5e-5, and nothing raises."
    )
    bad = (_CLASS.format(unscale="pass", step=_DIVIDE),)
    good = (
        _CLASS.format(unscale=_DIVIDE, step="pass"),
        _CLASS.format(unscale="pass", step="pass").replace("loss * self.scale_factor", "loss"),
    )
    references = ("https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping",)
    words = ("unscale_",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Classes with `scale` that multiplies, `step`, and an empty `unscale_`."""
        for cls in (n for n in all_statements(script.tree) if isinstance(n, ast.ClassDef)):
            methods = {n.name: n for n in cls.body if isinstance(n, ast.FunctionDef)}
            unscale, step = methods.get("unscale_"), methods.get("step")
            if unscale is None or step is None or not _is_empty(unscale) or not _multiplies(methods.get("scale")):
                continue
            if _divides(step):
                yield self.finding(
                    script.where(unscale),
                    f"`{cls.name}.unscale_` does nothing, and only `step` divides the gradients: what clips or logs them in between sees them "
                    "multiplied by the scale",
                    instead="divide in unscale_, and in step only if unscale_ has not been called",
                )


def _is_empty(method: ast.FunctionDef) -> bool:
    """Whether a method has no effect: `pass`, `...`, a docstring or `return`."""
    return all(
        isinstance(s, ast.Pass)
        or (isinstance(s, ast.Return) and (s.value is None or constant(s.value) is not ...))
        or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        for s in method.body
    )


def _multiplies(method: ast.FunctionDef | None) -> bool:
    """Whether a method returns one of its arguments times a factor."""
    returns = [n.value for n in ast.walk(method) if isinstance(n, ast.Return)] if method is not None else []
    return any(
        (isinstance(v, ast.BinOp) and isinstance(v.op, ast.Mult))
        or (isinstance(v, ast.Call) and text_of(v.func).rpartition(".")[2] in {"mul", "mul_"})
        for v in returns
    )


def _divides(method: ast.FunctionDef) -> bool:
    """Whether a method divides gradients, or multiplies them by a reciprocal."""
    for node in ast.walk(method):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in {"div_", "mul_", "_foreach_div_", "_foreach_mul_"} and "grad" in text_of(node):
                return True
        elif isinstance(node, (ast.AugAssign, ast.BinOp)) and isinstance(node.op, (ast.Div, ast.Mult)):
            target = node.target if isinstance(node, ast.AugAssign) else node.left
            if "grad" in text_of(target):
                return True
    return False


RULES: tuple[type[Rule], ...] = (UnscaleDoesNothing,)
