"""HS100: attributes that GradScaler does not have."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.expressions import options_of
from halfstep.check.script.objects.values import constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
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
        names = {last_name(s.key) for s in script.scalers if s.api in _TORCH} - {""}
        if not names:
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
                or last_name(key) not in names
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


def _is_scaler(script: Script, key: str, function: Function) -> bool:
    """Whether a variable is a scaler of torch or None, whatever line assigns it."""
    owner, _, name = key.rpartition(".")
    if owner in {"", "self"}:
        values: list[ast.expr | None] = []
        values += script.outline.values(key, function) if key not in function.params else []
    else:
        cls = _class_of(script, owner, function)
        values = [b.value for b in script.outline.bindings.get(f"self.{name}", ()) if cls and b.function.cls == cls]
    created = {s.node for s in script.scalers if s.api in _TORCH}
    if None in values:
        return False  # a loop or an argument assigns it
    options = [option for value in values if value is not None for option in options_of(value)]
    known = [o for o in options if not (isinstance(o, ast.Constant) and constant(o) is None)]
    return bool(known) and all(o in created for o in known)


def _class_of(script: Script, name: str, function: Function) -> str:
    """The class of the file that a parameter is annotated with; "" for any other variable."""
    args = getattr(function.node, "args", None)
    listed = [*args.posonlyargs, *args.args, *args.kwonlyargs] if isinstance(args, ast.arguments) else []
    annotation = next((a.annotation for a in listed if a.arg == name), None)
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
