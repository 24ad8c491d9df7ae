"""Hooks of the backward pass in which a number depends on the size of gradients: `weight.register_hook(lambda g: g.clamp(-1, 1))`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["measuring_hooks"]

# Each kind of hook, and the position of the first parameter that has gradients.
_HOOKS = {
    "register_hook": 0,
    "register_post_accumulate_grad_hook": 0,
    "register_full_backward_hook": 1,
    "register_multi_grad_hook": 0,
}
_PARAMETER = regex(
    r"param|\bweights?\b|\bbias\b|(^|\.)[pw]$"
)  # of a tensor: a hook of an activation may be for a picture
_LIMITS = {"clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_max", "hardtanh"}
_NUMBERS = {"norm", "vector_norm", "abs", "max", "mean", "std", "var", "square", "pow"}
_NOISE = regex(r"(rand|randn|normal)(_like)?$")
Def = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def measuring_hooks(script: Script) -> Iterator[tuple[ast.expr, str]]:
    """What such hooks do with the size of gradients, each hook with one operation; one that names the scale takes it into account."""
    for name, position in _HOOKS.items():
        for call, function in script.outline.calls.get(name, ()):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            if not call.args or owner is None or (name == "register_hook" and not _is_parameter(script, owner, call)):
                continue
            hook = _function_of(script, call.args[-1], function)
            if hook is None or "scale" in ast.unparse(hook):
                continue
            params = [a.arg for a in (*hook.args.posonlyargs, *hook.args.args)]
            params = params[params[:1] == ["self"] :][position:]
            body = [hook.body] if isinstance(hook, ast.Lambda) else hook.body
            nodes = [n for part in body for n in ast.walk(part)]
            measured = next((what for n in nodes if (what := _measured(n, set(params[:2])))), None)
            if measured is not None and not _normalizes(nodes):
                yield call, measured


def _is_parameter(script: Script, owner: ast.expr, call: ast.Call) -> bool:
    """Whether a hook is one of a weight: of a loop over parameters, or of an attribute with such a name."""
    key = key_of(owner)
    if _PARAMETER.search(key):
        return True
    loops = (n for n in script.above(call) if isinstance(n, ast.For))
    return any(key in {text_of(t) for t in ast.walk(n.target)} and "param" in text_of(n.iter) for n in loops)


def _function_of(script: Script, hook: ast.expr, function: Function) -> Def | None:
    """The function of this file that is attached: a lambda, a name, a method, or what a partial calls."""
    if isinstance(hook, ast.Call) and last_name(key_of(hook.func)) == "partial" and hook.args:
        hook = hook.args[0]
    if isinstance(hook, ast.Lambda):
        return hook
    name = last_name(key_of(hook))
    named = [f for f in script.outline.functions if f.name == name and (not f.method or f.cls == function.cls)]
    node = named[0].node if len(named) == 1 else None
    return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _measured(node: ast.AST, params: set[str]) -> str:
    """The operation of a node on a gradient that depends on its size; "" for any other."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        noises = [n for n in ast.walk(node.right) if isinstance(n, ast.Call) and _NOISE.search(key_of(n.func))]
        return text_of(node) if _is_gradient(node.left, params) and noises else ""
    if not isinstance(node, ast.Call):
        return ""
    last = last_name(key_of(node.func)) or getattr(node.func, "attr", "")
    is_method = isinstance(node.func, ast.Attribute) and _is_gradient(node.func.value, params)
    is_function = bool(node.args) and _is_gradient(node.args[0], params)
    return text_of(node) if last in _LIMITS | _NUMBERS and (is_method or is_function) else ""


def _is_gradient(node: ast.expr, params: set[str]) -> bool:
    """Whether an expression is the gradient of a hook: its parameter, one of a tuple of them, or `p.grad`."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in params


def _normalizes(nodes: list[ast.AST]) -> bool:
    """Whether a hook divides by what it measures, so that the scale cancels, or only tests for inf and NaN."""
    divides = any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div) for n in nodes)
    names = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return divides or (bool(names & {"isnan", "isfinite", "isinf"}) and not names & _LIMITS)
