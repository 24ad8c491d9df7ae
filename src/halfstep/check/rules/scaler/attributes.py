"""HS100: attributes that GradScaler does not have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.expressions import options_of
from halfstep.check.script.objects.values import constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes, statements_in
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

# Of torch.amp.GradScaler, without those of object.
_ATTRIBUTES = frozenset({
    "_backoff_factor", "_check_inf_per_device", "_check_scale_growth_tracker", "_device", "_enabled", "_found_inf_per_device",
    "_get_growth_tracker", "_get_scale_async", "_growth_factor", "_growth_interval", "_growth_tracker", "_init_growth_tracker",
    "_init_scale", "_lazy_init_scale_growth_tracker", "_maybe_opt_step", "_per_optimizer_states", "_scale", "_unscale_grads_",
    "get_backoff_factor", "get_growth_factor", "get_growth_interval", "get_scale", "is_enabled", "load_state_dict", "scale",
    "set_backoff_factor", "set_growth_factor", "set_growth_interval", "state_dict", "step", "unscale_", "update",
})  # fmt: skip
_SCALER = regex(r"scaler", re.IGNORECASE)
_TORCH = {"torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler", "GradScaler"}
_CLIP = """\
import torch

class Amp:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

def clip(model, amp: Amp, optimizer):
    {unscale}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""
_LOG = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    log(scaler.{scale})
"""


class UnknownScalerAttribute(ScriptRule):
    """The script reads an attribute that torch's GradScaler does not have."""

    code = "HS100"
    name = "unknown-scaler-attribute"
    severity = "error"
    reason = (
        "A GradScaler does not keep a list of optimizers, a flag for the last overflow or a loss scale under a public name: reading one "
        "raises AttributeError, often only where training first clips or logs. The scale is `scaler.get_scale()`, an optimizer is passed "
        "to `unscale_` and `step`, and a step was skipped if `update()` made the scale smaller."
    )
    bad = (
        _CLIP.format(unscale="amp.scaler.unscale_(amp.scaler._optimizers[0])"),
        _LOG.format(scale="loss_scale"),
        _LOG.format(scale="get_scale_factor()"),
    )
    good = (
        _CLIP.format(unscale="amp.scaler.unscale_(optimizer)"),
        _LOG.format(scale="get_scale()"),
        _LOG.format(scale="loss_scale if hasattr(scaler, 'loss_scale') else scaler.get_scale()"),
    )
    references = (
        "https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler",
        "measured: dir() of a GradScaler of torch 2.13.0",
    )
    words = ("GradScaler",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Attributes of variables that only are torch's scalers, unless the text sets them or asks whether they exist."""
        if not _mentions_class(script):
            return
        nodes = [n for n in all_nodes(script.tree) if isinstance(n, ast.Attribute)]
        stored = {n.attr for n in nodes if isinstance(n.ctx, ast.Store)}
        asked = {n.value for n in all_nodes(script.tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        known = _ATTRIBUTES | stored | asked
        reported: set[tuple[str, str]] = set()
        for node in sorted(nodes, key=lambda n: (n.lineno, n.col_offset)):
            key = key_of(node.value)
            if (
                (key, node.attr) in reported
                or node.attr in known
                or not _SCALER.search(last_name(key))
                or node.attr.startswith("__")
            ):
                continue
            function = _function_of(script, node)
            if _is_scaler(script, key, function) and not any(isinstance(n, ast.Try) for n in script.above(node)):
                reported.add((key, node.attr))
                yield self.finding(
                    script.where(node),
                    f"`{key}` is a GradScaler, which has no `{node.attr}`: AttributeError",
                    instead=_instead(node.attr, key),
                )


def _mentions_class(script: Script) -> bool:
    """Whether the file creates a scaler of torch, or names the class, as in annotations."""
    named = "GradScaler" in script.outline.loads or any(i.full in _TORCH for i in script.outline.names.imported)
    return named or any(s.api in _TORCH for s in script.scalers)


def _is_scaler(script: Script, key: str, function: Function) -> bool:
    """Whether a variable is a scaler of torch or None, whatever line assigns it."""
    owner, _, name = key.rpartition(".")
    sources: list[tuple[ast.expr | None, Function]] = []
    if owner in {"", "self"}:
        bound = script.outline.bindings.get(key, ())
        if key in function.params and not any(b.function is function for b in bound):
            if _annotation(function, key) is not None:
                return _is_annotated(script, function, key)
            sources += [s for v, scope in script.outline.passed(key, function) for s in _followed(script, v, scope)]
        else:
            sources += script.outline.sources(key, function)
    else:
        cls = _class_of(script, owner, function)
        bindings = script.outline.bindings.get(f"self.{name}", ()) if cls else ()
        sources += [(b.value, b.function) for b in bindings if b.function.cls == cls]
    options = [(o, scope) for value, scope in sources for o in (options_of(value) if value is not None else [None])]
    known = [(o, scope) for o, scope in options if not (isinstance(o, ast.Constant) and constant(o) is None)]
    return bool(known) and all(o is not None and _creates(script, o, scope) for o, scope in known)


def _followed(script: Script, value: ast.expr, function: Function) -> list[tuple[ast.expr, Function]]:
    """What a value that is passed may be, with the function it is in."""
    return (script.outline.sources(key_of(value), function) if key_of(value) else []) or [(value, function)]


def _creates(script: Script, value: ast.expr, function: Function, depth: int = 2) -> bool:
    """Whether a value is a new scaler of torch, also what a function of the file returns, or a parameter that is annotated as one."""
    scaler = script.scaler_of.get(value)
    if scaler is not None:
        return scaler.api in _TORCH
    if isinstance(value, ast.Name) and value.id in function.params:
        return _is_annotated(script, function, value.id)
    target = script.outline.call_target(value, function) if isinstance(value, ast.Call) and depth else None
    if target is None or target.name == "__init__":
        return False
    returned = [n.value for n in statements_in(target.node) if isinstance(n, ast.Return) and n.value is not None]
    options = [o for r in returned for v in script.outline.values(key_of(r), target) or [r] for o in options_of(v)]
    known = [o for o in options if not (isinstance(o, ast.Constant) and constant(o) is None)]
    return bool(known) and all(_creates(script, o, target, depth - 1) for o in known)


def _is_annotated(script: Script, function: Function, name: str) -> bool:
    """Whether a parameter is annotated as a scaler of torch or None."""
    parts = _parts_of(_annotation(function, name))
    full = {script.outline.names.full(part) for part in parts}
    return bool(full) and full <= _TORCH


def _parts_of(annotation: ast.expr | None) -> list[ast.expr]:
    """The types that an annotation allows, without None: of `Optional[GradScaler]`, `GradScaler | None`."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return [*_parts_of(annotation.left), *_parts_of(annotation.right)]
    if isinstance(annotation, ast.Subscript) and last_name(key_of(annotation.value)) == "Optional":
        return _parts_of(annotation.slice)
    if annotation is None or (isinstance(annotation, ast.Constant) and constant(annotation) is None):
        return []
    return [annotation]


def _annotation(function: Function, name: str) -> ast.expr | None:
    args = getattr(function.node, "args", None)
    listed = [*args.posonlyargs, *args.args, *args.kwonlyargs] if isinstance(args, ast.arguments) else []
    return next((a.annotation for a in listed if a.arg == name), None)


def _class_of(script: Script, name: str, function: Function) -> str:
    """The class of the file that a parameter is annotated with; "" for any other variable."""
    annotation = _annotation(function, name)
    named = [n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)] if annotation is not None else []
    classes = [n for n in named if n in script.outline.classes]
    return classes[0] if len(classes) == 1 and not script.outline.bindings.get(name) else ""


def _function_of(script: Script, node: ast.AST) -> Function:
    """The function around a node, or the module."""
    above = list(script.above(node))
    return next((f for f in script.outline.functions for n in above if f.node is n), script.outline.module)


def _instead(attribute: str, key: str) -> str:
    if "optim" in attribute:
        return "pass the optimizer itself"
    return f"{key}.get_scale()" if "scale" in attribute else "compare get_scale() before and after update()"


RULES: tuple[type[Rule], ...] = (UnknownScalerAttribute,)
