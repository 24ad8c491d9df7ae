"""HS179: NaN times zero."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.scaling.masked_losses import is_zero, masked_losses
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import blocks_of
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_ZEROED = """\
import torch
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    if not torch.isfinite(loss):
        {zeroed}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_MASKED = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    loss = {masked}
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
_INSTEAD = "skip this micro-batch with `continue`, after clearing the gradients"
_NOT_FINITE = regex(r"is_?(nan|inf|finite)", re.IGNORECASE)


class NanTimesZero(ScriptRule):
    """A loss that is NaN is multiplied by zero, and stays NaN."""

    code = "HS179"
    name = "nan-times-zero"
    severity = "error"
    reason = (
        "NaN * 0 and inf * 0 are NaN, so a loss that is multiplied by zero when it is not finite is still NaN, and the backward "
        "through the operation that overflowed multiplies zero by inf: the gradients are NaN and the step destroys the weights. "
        "Skip the micro-batch, or use a zero that does not depend on the loss."
    )
    bad = (
        _ZEROED.format(zeroed="loss = loss * 0.0"),
        _ZEROED.format(zeroed="loss *= 0"),
        _MASKED.format(masked="loss * torch.isfinite(loss).float()"),
    )
    good = (_ZEROED.format(zeroed="continue"), _MASKED.format(masked="loss[torch.isfinite(loss)].sum()"))
    references = (
        "https://en.wikipedia.org/wiki/NaN#Operations_generating_NaN",
        "https://docs.pytorch.org/docs/stable/notes/autograd.html",
    )
    lines = ("isnan", "isinf", "isfinite")

    def check(self, script: Script) -> Iterator[Finding]:
        """`loss = loss * 0` under a test that the loss is not finite, before a backward."""
        if "backward" not in script.outline.calls or not _NOT_FINITE.search(script.source.text):
            return
        for test in (n for n in script.outline.parents if isinstance(n, ast.If)):
            if not _NOT_FINITE.search(text_of(test.test)):
                continue
            for statement in test.body:
                name = _zeroed(statement)
                names = {name, *_numbers_of(script, test, name)}
                if name and any(_tested(test.test, n) for n in names) and re.search("loss", name, re.IGNORECASE):
                    yield self.finding(
                        script.where(statement),
                        f"NaN * 0 is NaN: `{name}` is still not finite, and its backward gives NaN gradients",
                        instead=_INSTEAD,
                    )
        for product, name in masked_losses(script):
            yield self.finding(
                script.where(product),
                f"NaN * 0 is NaN: where `{name}` is not finite, its product with zero is not finite either, and its backward gives NaN gradients",
                instead=_INSTEAD,
            )


def _numbers_of(script: Script, test: ast.If, name: str) -> set[str]:
    """The variables right before a test that have a tensor's value as a number: `value = loss.item()`."""
    block = next((b for b in blocks_of(script.outline.parents.get(test)) if test in b), [])
    assigns = [s for s in block[: block.index(test)] if isinstance(s, ast.Assign)] if block else []
    return {key_of(s.targets[0]) for s in assigns if text_of(s.value) in {f"{name}.item()", f"float({name})"}}


def _zeroed(statement: ast.stmt) -> str:
    """The variable that a statement multiplies by zero: `loss = loss * 0.0`, `loss *= 0`, `return loss * 0`; "" for any other."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Mult):
        return key_of(statement.target) if is_zero(statement.value) else ""
    value = statement.value if isinstance(statement, (ast.Assign, ast.Return)) else None
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Mult):
        return ""
    factors = [value.left, value.right]
    names = [key_of(t) for t in statement.targets] if isinstance(statement, ast.Assign) else list(map(key_of, factors))
    return next((n for n in names if n and any(map(is_zero, factors)) and n in map(key_of, factors)), "")


def _tested(test: ast.expr, name: str) -> bool:
    """Whether a condition is about a variable and true where it is not finite."""
    for call in (n for n in ast.walk(test) if isinstance(n, ast.Call) and _NOT_FINITE.search(text_of(n.func))):
        about = {key_of(n) for n in ast.walk(call) if isinstance(n, (ast.Name, ast.Attribute))}
        if name in about:
            is_finite = "finite" in text_of(call.func).lower()
            return not is_finite or "not " in text_of(test) or "~" in text_of(test)
    return False


RULES: tuple[type[Rule], ...] = (NanTimesZero,)
