"""The modules of a model that a file trains again after a freeze: `model.head.requires_grad_(True)`, and loops over their parameters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.objects.weights import Lineage
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.trained.getters import path_of

__all__ = ["ADDED", "ITERATED", "LIFTS", "SWITCHES", "enabled_parts", "full_path", "is_switched_on"]

ITERATED = {"parameters", "named_parameters", "modules", "named_modules"}
# Parts that are attached to a loaded model, in float32.
ADDED = regex(
    r"lora|adapter|prompt|query|proj|head|classifier|connector|resampler|mlp|gate|\bln|norm|memory|router|new|float|new_|extra|custom",
    re.IGNORECASE,
)
LIFTS = regex(r"\.float\(|float32|lora|adapter|peft|quant|kbit", re.IGNORECASE)
# A function that freezes a model or trains it again.
SWITCHES = regex(r"requires_?grad|toggle|trainable", re.IGNORECASE)


def enabled_parts(outline: Outline) -> tuple[tuple[str, Function], ...]:
    """The modules that are trained again after a freeze: `model.head.requires_grad_(True)`, or a loop over its parameters."""
    parts = []
    for call, function in outline.calls.get("requires_grad_", ()):
        value = constant(call.args[0]) if call.args else True
        if value is True and not call.keywords and isinstance(call.func, ast.Attribute):
            parts.append((path_of(call.func.value) or text_of(call.func.value), function))
    for name in ("parameters", "named_parameters"):
        for call, function in outline.calls.get(name, ()):
            loop = outline.parents.get(call)
            is_loop = isinstance(loop, ast.For) and loop.iter is call and _enables_each(loop)
            if is_loop and isinstance(call.func, ast.Attribute):
                parts += [(text, function) for text in _iterated(outline, call.func.value, loop, function)]
    return (*parts, *_enabled_by_name(outline))


def _enables_each(loop: ast.For) -> bool:
    """Whether a loop makes every parameter trainable: `p.requires_grad = True` or `p.requires_grad_()`, under no condition."""
    names = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    body = " ".join(map(ast.unparse, loop.body))
    if body.count("requires_grad") != 1 or any(isinstance(n, (ast.Continue, ast.Break)) for n in ast.walk(loop)):
        return False
    for statement in loop.body:
        made = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(statement, ast.Assign) and constant(statement.value) is True:
            target = key_of(statement.targets[0])
        elif isinstance(made, ast.Call) and (not made.args or constant(made.args[0]) is True) and not made.keywords:
            target = key_of(made.func).removesuffix("_")
        else:
            continue
        owner, _, attribute = target.rpartition(".")
        if attribute == "requires_grad" and owner in names:
            return True
    return False


def _iterated(outline: Outline, owner: ast.expr, loop: ast.AST | None, function: Function) -> list[str]:
    """The layers of `for layer in model.layers[-2:]:` around a loop over the parameters of each; else the owner itself."""
    outer = outline.parents.get(loop) if loop is not None else None
    if isinstance(outer, ast.For) and isinstance(owner, ast.Name) and key_of(outer.target) == owner.id:
        source = outer.iter.value if isinstance(outer.iter, ast.Subscript) else outer.iter
        if isinstance(source, (ast.List, ast.Tuple)):  # `for part in [encoder, projection]:`
            return [full_path(outline, text_of(part), function) for part in source.elts]
        return [full_path(outline, key_of(source) or owner.id, function)]
    if isinstance(outer, ast.If) and (whole := _searched(outline, owner, outer)):
        return [full_path(outline, whole, function)]
    return [full_path(outline, path_of(owner) or text_of(owner), function)]


def _searched(outline: Outline, owner: ast.expr, test: ast.If) -> str:
    """The chosen modules of `for name, m in model.named_modules(): if "attn" in name:`, as a part of the model; or ""."""
    outer = outline.parents.get(test)
    func = outer.iter.func if isinstance(outer, ast.For) and isinstance(outer.iter, ast.Call) else None
    if not isinstance(outer, ast.For) or not isinstance(func, ast.Attribute) or func.attr not in ITERATED:
        return ""
    is_own = key_of(owner) in {key_of(n) for n in ast.walk(outer.target)} - {""}
    return f"{key_of(func.value)}.modules" if is_own and not ADDED.search(text_of(test.test)) else ""


def full_path(outline: Outline, text: str, function: Function) -> str:
    """A part as a path from its model: `model.vision.encoder` for `encoder`, after `encoder = model.vision.encoder`."""
    for _ in range(4):
        first, separator, rest = text.partition(".")
        values = [b.value for b in outline.bindings.get(first, ()) if b.function is function and b.index is None]
        reached = {path_of(value) for value in values if not isinstance(value, ast.Name)}
        path = reached.pop() if len(reached) == 1 and not any(isinstance(v, ast.Name) for v in values) else ""
        if not path or path.partition(".")[0] in {"self", first}:
            break
        text = f"{path}{separator}{rest}"
    return text


def _enabled_by_name(outline: Outline) -> Iterator[tuple[str, Function]]:
    """The layers of a loaded model that a loop trains again: `if "lm_head" in name: p.requires_grad = True`."""
    for call, function in outline.calls.get("named_parameters", ()):
        loop = outline.parents.get(call)
        test = loop.body[0] if isinstance(loop, ast.For) and loop.iter is call and len(loop.body) == 1 else None
        if not isinstance(test, ast.If) or not isinstance(call.func, ast.Attribute):
            continue
        enables = [n for n in test.body if isinstance(n, ast.Assign) and constant(n.value) is True]
        compared = [n for n in ast.walk(test.test) if isinstance(n, ast.Compare)]
        words = [constant(c.left) for c in compared if len(c.ops) == 1 and isinstance(c.ops[0], ast.In)]
        is_part = bool(words) and len(words) == len(compared) and all(isinstance(word, str) for word in words)
        negated = any(isinstance(n, ast.Not) for n in ast.walk(test.test))
        own = [str(word) for word in words if not ADDED.search(str(word).replace("lm_head", ""))]
        if negated or not is_part or len(own) < len(words) or LIFTS.search(ast.unparse(test)):
            continue
        if any(text_of(n.targets[0]).endswith(".requires_grad") for n in enables) and not _is_lifted(outline, own):
            yield from ((f"{text_of(call.func.value)}.{word.strip('.')}", function) for word in own)


def _is_lifted(outline: Outline, parts: list[str]) -> bool:
    """Whether a layer of one of these names is cast, most likely to float32: `model.lm_head.float()`."""
    owners = [
        c.func.value for n in ("float", "to") for c, _ in outline.calls.get(n, ()) if isinstance(c.func, ast.Attribute)
    ]
    return any(part in text_of(owner) for owner in owners for part in parts)


def is_switched_on(lineage: Lineage, parts: tuple[tuple[str, Function], ...]) -> bool:
    """Whether what freezes a whole model is undone, as GANs do in each step: `set_requires_grad(netD, True)`."""
    if any(lineage.has(text, function) for text, function in parts):
        return True
    sites = [site for name, calls in lineage.outline.calls.items() if SWITCHES.search(name) for site in calls]
    return any(
        lineage.has(key_of(call.args[0]), function)
        and any(constant(value) is True for value in (*call.args[1:], *(k.value for k in call.keywords)))
        for call, function in sites
        if call.args
    )
