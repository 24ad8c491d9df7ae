"""HS612: targets of a regression that are rounded to 16 bits before the loss."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.logit_formats import logit_formats
from halfstep.check.script.flow.sources import latest
from halfstep.check.script.objects.formats import SIXTEEN_BIT, cast_formats
from halfstep.check.script.objects.outputs import in_no_grad, leaves_autocast
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_FUNCTIONAL = "torch.nn.functional."
_REGRESSIONS = {f"{_FUNCTIONAL}{name}" for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")}
_REGRESSIONS |= {f"torch.nn.{name}" for name in ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss")}
_LOSS = regex(r"(loss|criterion|crit|loss_fn|loss_func|mse|mae|objective)$|^(loss|criterion)")
_LOSSES = ("mse_loss", "l1_loss", "MSELoss", "L1Loss", "smooth_l1_loss", "SmoothL1Loss", "huber_loss", "HuberLoss")
_BITS = {"bfloat16": 8, "float16": 11}
_FIT = """\
import torch
criterion = torch.nn.MSELoss()
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(x)
    loss = criterion({out}, {target})
    loss.backward()
    optimizer.step()
"""
_NONE: frozenset[str] = frozenset()
_NORMS = {"pow", "square", "abs"}
_OF_LOSS = regex(r"(^|[._])loss")
_OF_ERROR = regex(r"(huber|mse|l1|l2)(_loss)?$")  # functions of the script's own
_TARGET = regex(r"(^|[._])(y|gt|targets?|labels?|truth|returns?|y_true|rewards?)($|[_\d])")
MAX_STEPS = 10  # between a loss and the cast of its target
# Values that these give are the values that they get.
_KEEPS = {
    "clamp", "clip", "clone", "contiguous", "detach", "flatten", "permute", "reshape", "squeeze", "transpose", "unsqueeze", "view", "cuda",
    "cpu", "to", "flip", "expand",
}  # fmt: skip
_CASTS = {"to", "half", "bfloat16", "float", "type"}


class Loss(NamedTuple):
    """A regression loss or the difference that it is computed from, with its two sides."""

    node: ast.expr
    out: ast.expr
    target: ast.expr
    function: Function


class RoundedTargets(ScriptRule):
    """A regression loss is computed on values that are cast to 16 bits for it."""

    code = "HS612"
    name = "rounded-targets"
    severity = "warning"
    reason = (
        "bfloat16 has 8 significant bits: a target that is cast to it before the loss is wrong by up to 0.4 %. If the output is cast too, one "
        "that is nearer often rounds to the same number, and its residual and gradient are exactly zero: where it is 0.1 % off, in 82 % of "
        "100,000 random values (torch 2.13). "
        "Autocast computes these losses in float32, but cannot restore the bits that the cast rounded away."
    )
    bad = (
        _FIT.format(out="out.to(torch.bfloat16)", target="y.to(torch.bfloat16)"),
        _FIT.format(out="out", target="y.half()"),
        _FIT.format(out="out", target="y").replace(
            "    loss =", "    out, y = out.bfloat16(), y.bfloat16()\n    loss ="
        ),
        _FIT.format(out="out", target="y").replace("    loss =", "    y = y.to(device, torch.bfloat16)\n    loss ="),
    )
    good = (
        _FIT.format(out="out.float()", target="y"),
        _FIT.format(out="out", target="y.to(torch.bfloat16)").replace("MSELoss", "BCEWithLogitsLoss"),
    )
    references = ("https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-autocast-to-float32",)
    lines = _LOSSES

    def check(self, script: Script) -> Iterator[Finding]:
        """Regression losses in training whose target is a cast to 16 bits."""
        if not script.has("backward", "owned_backward"):
            return
        rounded: set[ast.Call] = set()
        for node, out, target, function in (*_regressions(script), *_written_out(script)):
            line = getattr(node, "lineno", 0)
            formats = _cast_of(script, target, function, line)
            if in_no_grad(script, node):
                continue
            if not formats:
                cast = _rounded_before(script, target, function, line)
                if cast is not None and cast not in rounded:
                    rounded.add(cast)
                    yield self._report_earlier(script, node, target, cast)
                continue
            low = formats & SIXTEEN_BIT
            name = " or ".join(sorted(low))
            bits = min(_BITS[f] for f in low)
            when = "" if formats <= SIXTEEN_BIT else f"where `{_chosen(target)}` is {name}, "
            effect = f"{when}`{_base(target)}` is rounded to {name} for this loss, which leaves {bits} significant bits of the target"
            if _cast_of(script, out, function, line):
                effect = (
                    f"{when}`{_base(out)}` and `{_base(target)}` are rounded to {name} for this loss: residuals below {bits} significant bits are zero, "
                    "and so are their gradients"
                )
            instead = f"{_base(out)}.float() - {_base(target)}.float()"
            if isinstance(node, ast.Call):
                instead = f"{text_of(node.func)}({_base(out)}.float(), {_base(target)}.float())"
            yield self.finding(script.where(node), effect, instead=instead)

    def _report_earlier(self, script: Script, node: ast.AST, target: ast.expr, cast: ast.Call) -> Finding:
        name = text_of(_chosen_of(cast)).rpartition(".")[2] or last_name(text_of(cast.func))
        return self.finding(
            script.where(node),
            f"the target `{_base(target)}` was rounded by `.{last_name(text_of(cast.func))}` ({script.at(cast)}, {name}): float32 does not "
            "restore its bits",
            instead="keep the target in float32, and cast what the model gets",
        )


def _rounded_before(script: Script, node: ast.expr | None, function: Function, line: int) -> ast.Call | None:
    """The cast to bfloat16 of a target that has float32 again at the loss: `x = x.bfloat16()`, `loss(out, x.float())`."""
    for _ in range(MAX_STEPS):
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            formats = cast_formats(script.outline, node, function)
            if formats == {"bfloat16"}:  # an image of 8 bits has as many in float16
                return node
            if formats - {"float32"} or (not formats and node.func.attr not in _KEEPS):
                return None
            node = node.func.value
        elif isinstance(node, ast.Name):
            bindings = latest(script.outline, node.id, function, line)
            if len(bindings) == 1 and bindings[0].index is None:
                node, line = bindings[0].value, getattr(bindings[0].node, "lineno", 0)
                continue
            is_param = not bindings and node.id in function.params
            passed = list(script.outline.passed(node.id, function)) if is_param else []
            if len(passed) != 1:
                return None
            node, function = passed[0]
            line = getattr(node, "lineno", 0)
        else:
            return None
    return None


def _regressions(script: Script) -> Iterator[Loss]:
    """The calls of a regression loss of torch, each with its function."""
    outline = script.outline
    for call, function in [site for name, sites in outline.calls.items() if _LOSS.search(name) for site in sites]:
        key = key_of(call.func)
        values = outline.values(key, function) if key else []
        names = {outline.names.full(v.func) if isinstance(v, ast.Call) else "" for v in values}
        out, target = argument(call, 0, "input"), argument(call, 1, "target")
        is_regression = (names or {outline.names.full(call.func)}) <= _REGRESSIONS
        if is_regression and out is not None and target is not None:
            yield Loss(call, out, target, function)


def _written_out(script: Script) -> Iterator[Loss]:
    """The losses that a script computes itself from a difference: `loss = ((out - y) ** 2).mean()`, `value_loss = huber(error)`."""
    bound = [b for name, bindings in script.outline.bindings.items() if _OF_LOSS.search(name) for b in bindings]
    reported = set()
    for binding in bound:
        for node in ast.walk(binding.value) if binding.value is not None else ():
            inner = _of_error(node)
            if isinstance(inner, ast.Name):
                errors = latest(script.outline, inner.id, binding.function, inner.lineno)
                inner = errors[0].value if len(errors) == 1 and errors[0].index is None else None
            if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub):
                casts = [_cast_of(script, side, binding.function, inner.lineno) for side in (inner.left, inner.right)]
                named = [bool(_TARGET.search(_base(side))) for side in (inner.left, inner.right)]
                out, target = (inner.right, inner.left) if named[0] else (inner.left, inner.right)
                key = (binding.function, text_of(target))
                if (all(casts) or named in ([True, False], [False, True])) and key not in reported:
                    reported.add(key)
                    yield Loss(inner, out, target, binding.function)


def _of_error(node: ast.AST) -> ast.expr | None:
    """The difference of which an expression is a square, an absolute value or a loss of one argument."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return node.left if constant(node.right) == 2 else None
    if not isinstance(node, ast.Call):
        return None
    name = last_name(text_of(node.func))
    if name in _NORMS and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.BinOp | ast.Name):
        is_method = key_of(node.func.value) != "torch"
        return node.func.value if is_method else node.args[0] if node.args else None
    return node.args[0] if _OF_ERROR.search(name) and node.args else None


def _cast_of(script: Script, node: ast.expr | None, function: Function, line: int) -> frozenset[str]:
    """The formats that a cast gives a value, at the loss or in the assignment before it; empty if none or another one is possible.

    The dtype of a cast at the loss may be a choice between a 16-bit format and float32.
    """
    if isinstance(node, ast.Call):
        formats = _formats_of_cast(script, node, function)
        allowed = SIXTEEN_BIT | {"float32"} if line else SIXTEEN_BIT
        return formats if formats & SIXTEEN_BIT and formats <= allowed else _NONE
    bindings = latest(script.outline, key_of(node), function, line) if isinstance(node, ast.Name) else []
    values = [_element(binding.value, binding.index) for binding in bindings]
    parts = [_cast_of(script, v, function, 0) if isinstance(v, ast.Call) else _NONE for v in values]
    return frozenset().union(*parts) if parts and all(parts) else _NONE


def _formats_of_cast(script: Script, call: ast.Call, function: Function) -> frozenset[str]:
    """The formats of a cast, also of `y.to(out.dtype)` where the text decides what a model returns."""
    formats = cast_formats(script.outline, call, function)
    dtype = _chosen_of(call)
    if formats or not isinstance(dtype, ast.Attribute) or dtype.attr != "dtype":
        return formats
    formats = logit_formats(script, dtype.value, function, call.lineno)
    left = leaves_autocast(script, dtype.value, function, call.lineno) if not formats else None
    return left.formats if left is not None and left.is_certain else formats


def _chosen_of(call: ast.Call) -> ast.expr | None:
    """The last argument of a cast: its dtype."""
    is_cast = isinstance(call.func, ast.Attribute) and call.func.attr in {"to", "type"}
    named = argument(call, None, "dtype")
    return named if named is not None else call.args[-1] if is_cast and call.args else None


def _chosen(node: ast.expr | None) -> str:
    return text_of(_chosen_of(node)) if isinstance(node, ast.Call) else ""


def _element(value: ast.expr | None, index: int | None) -> ast.expr | None:
    """What a variable gets of `a, b = x.half(), y.half()`."""
    if index is None or not isinstance(value, ast.Tuple):
        return value if index is None else None
    return value.elts[index]


def _base(node: ast.expr) -> str:
    """A value as the text names it, without its casts."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CASTS:
        node = node.func.value
    return text_of(node)


RULES: tuple[type[Rule], ...] = (RoundedTargets,)
