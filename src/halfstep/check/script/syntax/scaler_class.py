"""The class of a scaler: torch's under its own name, or under that of a variable (`scaler_cls = NewScaler or GradScaler`)."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.syntax.children import nodes_in
from halfstep.check.script.syntax.names import chain
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function, Outline, last_name_of

__all__ = ["SCALERS", "SCALER_ARGUMENTS", "data_scalers", "is_data_scaler", "scaler_class"]

# Classes and functions whose scalers are for data: `StandardScaler()`, `fit_feature_scaler(rows)`.
_DATA = regex(
    r"(standard|min_?max|robust|max_?abs|data|feature|target|label|input|output|quantile|fit)_?\w*scaler", re.IGNORECASE
)
# What a scaler of data has, and a GradScaler has not.
_OF_DATA = {"transform", "inverse_transform", "fit", "fit_transform", "partial_fit", "inverse", "mean_", "scale_", "var_", "data_min_", "data_max_"}  # fmt: skip

SCALERS = {
    "torch.amp.GradScaler",
    "torch.cuda.amp.GradScaler",
    "torch.cpu.amp.GradScaler",
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    "fairscale.optim.grad_scaler.ShardedGradScaler",
    "torch_xla.amp.GradScaler",
    "halfstep.GradScaler",
}
# The keyword arguments of torch.amp.GradScaler; torch.cuda.amp.GradScaler has no `device`.
SCALER_ARGUMENTS = frozenset({"device", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"})


def is_data_scaler(name: str) -> bool:
    """Whether a class or a function creates a scaler of data, by its name."""
    return bool(_DATA.search(name)) and "grad" not in name.lower()


@lru_cache(maxsize=4)  # rules ask for every event of one script
def data_scalers(outline: Outline) -> frozenset[str]:
    """The last names with "scaler" in them that cannot be a GradScaler: one that is indexed, or that transforms data."""
    names = {name for name in outline.loads if "scaler" in name.lower()}
    if not names:
        return frozenset()
    used: set[str] = set()
    for node in nodes_in(outline.module.node):
        if isinstance(node, ast.Attribute) and node.attr in _OF_DATA:
            used.add(last_name_of(node.value))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            # `scaler["generator"].step(optimizer)` is one of several scalers.
            is_entry = isinstance(node.slice, ast.Constant)
            used |= {last_name_of(node.value)} if is_entry and not _has_attribute(outline, node) else set()
    return frozenset(name for name in names & used if not _is_created(outline, name))


def _has_attribute(outline: Outline, node: ast.AST) -> bool:
    return isinstance(outline.parents.get(node), ast.Attribute)


def _is_created(outline: Outline, name: str) -> bool:
    """Whether a variable or an attribute of this name is a new GradScaler somewhere in the file."""
    bound = [*outline.bindings.get(name, ()), *outline.bindings.get(f"self.{name}", ())]
    parts = (part for b in bound if b.value is not None for part in ast.walk(b.value) if isinstance(part, ast.Call))
    return any(last_name_of(call.func).endswith("GradScaler") for call in parts)


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
