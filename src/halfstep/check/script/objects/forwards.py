"""Operations in the forward of modules that run under autocast, and regions that are off unless a caller enables them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.script.objects.engines import loop_class
from halfstep.check.script.objects.losses import BCE
from halfstep.check.script.objects.values import Autocast, argument, autocasts_of, constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.scope import default_of

__all__ = ["bce_in_forward", "off_by_default"]

_LOSSES = {"torch.nn.BCELoss", "torch.nn.modules.loss.BCELoss"}


def bce_in_forward(script: Script) -> Iterator[ast.Call]:
    """Binary cross-entropies on probabilities, in the forward of a module that a CUDA autocast region calls.

    Lightning's mixed precision runs the steps of its modules in such a region.
    """
    outline = script.outline
    for name, methods in outline.classes.items() if "ightning" in script.source.text else ():
        loop = loop_class(script, name)
        if loop is None or loop.base == "trainer" or loop.precision not in {"fp16", "bf16"} or _on_cpu(script):
            continue
        for method in (m for n, m in methods.items() if n == "forward" or n.endswith(("step", "loss"))):
            for node in ast.walk(method.node):
                if (
                    isinstance(node, ast.Call)
                    and _is_bce(script, node, method)
                    and not _is_disabled(script, node, method)
                ):
                    yield node
    if any(a.device not in {"cuda", None} for a in script.autocasts):
        return
    for name in script.classes_under_autocast:
        forward = outline.classes.get(name, {}).get("forward")
        for node in ast.walk(forward.node) if forward is not None else ():
            if (
                isinstance(node, ast.Call)
                and _is_bce(script, node, forward)
                and not _is_disabled(script, node, forward)
            ):
                yield node


def _on_cpu(script: Script) -> bool:
    """Whether a Trainer is created for another device than CUDA."""
    calls = (call for call, _ in script.outline.calls.get("Trainer", ()))
    return any(constant(argument(call, None, "accelerator")) in {"cpu", "mps", "tpu"} for call in calls)


def _is_bce(script: Script, call: ast.Call, function: Function | None) -> bool:
    assert function is not None
    names = script.outline.names
    if names.full(call.func) in BCE:
        return True
    key = key_of(call.func)
    made = [call.func] if isinstance(call.func, ast.Call) else []
    if key.startswith("self."):
        methods = script.outline.classes.get(function.cls, {}).values()
        assigns = [n for m in methods for n in ast.walk(m.node) if isinstance(n, ast.Assign)]
        values = [a.value for a in assigns if any(key_of(t) == key for t in a.targets)]
        made = [v for v in values if isinstance(v, ast.Call)]
        if len(made) != len(values):
            return False
    return bool(made) and all(names.full(m.func) in _LOSSES for m in made)


def _is_disabled(script: Script, node: ast.AST, function: Function | None) -> bool:
    """Whether a region around a node turns autocast off."""
    assert function is not None
    blocks = (w for w in ast.walk(function.node) if isinstance(w, (ast.With, ast.AsyncWith)))
    regions = [
        a
        for w in blocks
        if any(n is node for n in ast.walk(w))
        for i in w.items
        for a in autocasts_of(script.outline, i.context_expr, function)
    ]
    return any(a.enabled == "no" for a in regions)


def off_by_default(script: Script, region: Autocast) -> bool:
    """Whether a region is enabled by a parameter whose default is False and that no call in this file sets."""
    for call, function in script.outline.library_calls.get(region.api, ()):
        if call is region.node and region.enabled in function.params and not isinstance(function.node, ast.Module):
            return constant(default_of(function, region.enabled)) is False and not any(
                k.arg == region.enabled for calls in script.outline.calls.values() for c, _ in calls for k in c.keywords
            )
    return False
