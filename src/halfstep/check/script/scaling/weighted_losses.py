"""Losses that a function divides by the number of micro-batches, or weighs by what it receives with that number."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.divisions import bindings_before, names_in
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function

__all__ = ["passed_to_loss", "weighed_with_owner"]

_RESCALES_LOSS = regex(r"loss|criterion|objective|rescale", re.IGNORECASE)
_PRINTS = regex(r"print|log|write|info|format|record|track|add_scalar|wandb|add_argument|append", re.IGNORECASE)
_LOSS = regex(r"(^|[._])\w*loss(es)?(\.\w+(\(\))?|\[[^\]]*\])?$", re.IGNORECASE)  # `losses.total`, not `loss_fn`


def passed_to_loss(script: Script, last: str, length: str) -> bool:
    """Whether what another file defines receives the number of micro-batches for a loss: `rescale_loss(loss_fn, n)`, `loss = model(x, n)`."""
    return any(
        (key_of(value).rsplit(".", 1)[-1] == last or text_of(value) == length)
        and (_is_about_loss(call) or _assigns_loss(script.outline.parents.get(call)))
        and not _PRINTS.search(text_of(call.func))
        and script.outline.call_target(call, function) is None
        for call, function in (site for sites in script.outline.calls.values() for site in sites)
        for value in (*call.args, *(k.value for k in call.keywords))
    )


def _is_about_loss(call: ast.Call) -> bool:
    """Whether a call may divide a loss: named for it, or with one among its arguments, unless it creates an object with settings."""
    name = text_of(call.func)
    is_class = name.rsplit(".", 1)[-1][:1].isupper()
    return bool(_RESCALES_LOSS.search(name if is_class else text_of(call)))


def _assigns_loss(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Assign) and any("loss" in text_of(target).lower() for target in node.targets)


def weighed_with_owner(script: Script, length: str, event: Event) -> bool:
    """Whether backward runs on what a function makes of a loss and of the object with the number of micro-batches: `plan.weigh(loss)`.

    One of this file divides if it has a quotient by what it receives as that object; one of another file may.
    """
    owner = length.rpartition(".")[0]
    names = names_in(event.node) - {"self"} if owner else set()
    bound = [b.value for name in names for b in bindings_before(script, name, event)[:MAX_BINDINGS]]
    nodes = [n for value in (event.node, *bound) if value is not None for n in ast.walk(value) if n is not event.node]
    return any(_weighs(script, node, owner, event) for node in nodes if owner and isinstance(node, ast.Call))


def _weighs(script: Script, call: ast.Call, owner: str, event: Event) -> bool:
    receiver = [("self", call.func.value)] if isinstance(call.func, ast.Attribute) else []
    target = script.outline.call_target(call, event.function)
    params = target.params[target.method and target.params[:1] == ("self",) :] if target is not None else []
    passed = [
        *zip(params or [""] * len(call.args), call.args, strict=False),
        *((k.arg, k.value) for k in call.keywords),
    ]
    if not any(_LOSS.search(text_of(value)) for _, value in passed):
        return False
    owners = {param for param, value in (*passed, *receiver) if key_of(value) == owner}
    return bool(owners) if target is None else any(not owners.isdisjoint(divisor) for divisor in _divisors(target))


def _divisors(function: Function) -> Iterator[set[str]]:
    """The names in each divisor of a function: `plan`, `total` of `loss * size / plan.total`."""
    for node in ast.walk(function.node):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield names_in(node.right)
