"""HS148: context managers joined by `and` or `or` in a `with` statement.

`with a() and b():` is valid Python and looks like a list of two contexts, but it is one expression with one value: a
context manager is truthy, so `and` evaluates to the last one and `or` to the first, and the others are discarded.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.values import AUTOCASTS, text_of
from halfstep.check.script.script import Script

__all__ = ["RULES"]

_EVAL = """\
import torch
model.eval()
with {contexts}:
    out = model(x)
"""
_AUTOCAST = 'torch.autocast("cuda", dtype=torch.float16)'
# Contexts without effect until they are entered; set_grad_enabled acts immediately.
_CONTEXTS = AUTOCASTS | {
    f"{module}.{mode}" for module in ("torch", "torch.autograd") for mode in ("no_grad", "inference_mode")
}


class ContextNotEntered(ScriptRule):
    """Contexts are joined by `and` or `or`, so only one of them is entered."""

    code = "HS148"
    name = "context-not-entered"
    severity = "warning"
    reason = (
        "`with autocast() and no_grad():` enters only no_grad: both objects are truthy, so `and` evaluates to the last one and `or` to "
        "the first. Without autocast the block runs in float32, without tensor cores and with activations twice as large; without "
        "no_grad every validation batch builds a graph. No error is raised. Separate contexts with a comma."
    )
    bad = (
        _EVAL.format(contexts=f"{_AUTOCAST} and torch.no_grad()"),
        _EVAL.format(contexts=f"torch.inference_mode() and {_AUTOCAST}"),
        _EVAL.format(contexts=f"{_AUTOCAST} or torch.no_grad()"),
    )
    good = (
        _EVAL.format(contexts=f"torch.no_grad(), {_AUTOCAST}"),
        _EVAL.format(contexts=f"torch.no_grad(), (use_amp and {_AUTOCAST} or nullcontext())"),
        _EVAL.format(contexts="torch.no_grad(), (autocast_context or nullcontext())"),
    )
    references = (
        "https://docs.python.org/3/reference/compound_stmts.html#the-with-statement",
        "https://docs.python.org/3/reference/expressions.html#boolean-operations",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Contexts that a `with` statement creates but does not enter."""
        calls = script.outline.library_calls
        contexts = {call for api in _CONTEXTS & calls.keys() for call, _ in calls[api]}
        for joined in dict.fromkeys(script.outline.parents.get(call) for call in contexts):
            if not isinstance(joined, ast.BoolOp) or not _opens_block(script, joined):
                continue
            dropped = _dropped(joined, contexts)
            if dropped is not None and not _is_implied(script, joined):
                word, entered = (
                    ("and", joined.values[-1]) if isinstance(joined.op, ast.And) else ("or", joined.values[0])
                )
                yield self.finding(
                    script.where(joined),
                    f"`{word}` evaluates to one operand: `{text_of(entered)}` is entered, `{text_of(dropped)}` is not",
                    instead=f"with {', '.join(map(text_of, joined.values))}:",
                )


def _opens_block(script: Script, node: ast.AST) -> bool:
    """Whether a `with` statement enters an expression, or chooses between it and others."""
    parent = script.outline.parents.get(node)
    while isinstance(parent, (ast.BoolOp, ast.IfExp)):
        parent = script.outline.parents.get(parent)
    return isinstance(parent, ast.withitem)


def _dropped(joined: ast.BoolOp, contexts: set[ast.Call]) -> ast.expr | None:
    """The first context that is certainly not the value of the expression."""
    if isinstance(joined.op, ast.And):
        return next((value for value in joined.values[:-1] if value in contexts), None)
    return next((value for value in joined.values[1:] if value in contexts and joined.values[0] in contexts), None)


def _is_implied(script: Script, joined: ast.BoolOp) -> bool:
    """Whether the context that is entered includes the others: inference_mode turns gradients off as well."""
    names = [script.outline.names.full(v.func) if isinstance(v, ast.Call) else "" for v in joined.values]
    entered = names.pop() if isinstance(joined.op, ast.And) else names.pop(0)
    return entered.endswith(".inference_mode") and all(name.endswith((".no_grad", ".inference_mode")) for name in names)


RULES: tuple[type[Rule], ...] = (ContextNotEntered,)
