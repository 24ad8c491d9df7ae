"""The class of a scaler: torch's under its own name, or under that of a variable (`scaler_cls = NewScaler or GradScaler`)."""

from __future__ import annotations

import ast

from halfstep.check.script.syntax.names import chain
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function, Outline

__all__ = ["SCALERS", "scaler_class"]

SCALERS = {
    "torch.amp.GradScaler",
    "torch.cuda.amp.GradScaler",
    "torch.cpu.amp.GradScaler",
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    "fairscale.optim.grad_scaler.ShardedGradScaler",
    "torch_xla.amp.GradScaler",
    "halfstep.GradScaler",
}


def scaler_class(outline: Outline, func: ast.expr, function: Function) -> str:
    """The full name of the scaler class that is called; "" if it is none, or one that the file defines."""
    full = outline.names.full(func)
    if full or not isinstance(func, ast.Name) or "scaler" not in func.id.lower() or func.id in outline.classes:
        return full if full in SCALERS else ""
    values = outline.values(func.id, function)
    if not values:
        # A fragment without its imports: the name is torch's.
        return "GradScaler" if func.id == "GradScaler" else ""
    options = [option for value in values[:MAX_BINDINGS] for option in _options(value)]
    classes = [_named(outline, option) for option in options if not _is_none(option)]
    return classes[0] if classes and all(classes) else ""


def _options(value: ast.expr) -> list[ast.expr]:
    """What `a if x else b` or `a or b` may be."""
    if isinstance(value, ast.IfExp):
        return [*_options(value.body), *_options(value.orelse)]
    return [o for v in value.values for o in _options(v)] if isinstance(value, ast.BoolOp) else [value]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _named(outline: Outline, node: ast.expr) -> str:
    """The scaler class that an expression names, also by `getattr(torch.amp, "GradScaler", None)`."""
    full = outline.names.full(node)
    if isinstance(node, ast.Call) and chain(node.func) == ("getattr",) and len(node.args) > 1:
        name = node.args[1]
        is_scaler = isinstance(name, ast.Constant) and name.value == "GradScaler"
        owner = outline.names.full(node.args[0]) or "torch.amp"
        full = f"{owner}.GradScaler" if is_scaler else ""
    elif isinstance(node, ast.Name) and not full:
        values = [v for v in outline.values(node.id, outline.module) if not _is_none(v) and not isinstance(v, ast.Name)]
        named = {_named(outline, v) for v in values[:MAX_BINDINGS]}
        full = named.pop() if len(named) == 1 else ""
    return full if full in SCALERS else ""
