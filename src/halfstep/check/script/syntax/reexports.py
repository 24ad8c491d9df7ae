"""torch's `autocast` and `GradScaler`, and Apex's `amp`, that a project exports again: `from .nn.functional import autocast`, `from utils import *`.

A project does that to support several versions of torch. How the name is called shows which signature it has: with `device_type=` it is
torch.amp's. Without one the module may choose the device and the dtype, so that the region is known and its format is not.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from halfstep.check.script.syntax.names import Names
from halfstep.check.script.syntax.scope import CallSite

__all__ = ["OWN_AUTOCAST", "resolve_exports", "resolve_stars"]

OWN_AUTOCAST = "project.own.autocast"
_EXPORTED = ("autocast", "GradScaler")
_ARGUMENTS = {"device_type", "enabled", "dtype", "cache_enabled"}
# Their functions of these names differ from torch's.
_LIBRARIES = {
    "accelerate", "apex", "colossalai", "composer", "deepspeed", "detectron2", "diffusers", "fairscale", "flax", "habana_frameworks", "halfstep",
    "ignite", "intel_extension_for_pytorch", "jax", "jittor", "keras", "lightning", "megatron", "mindspore", "mmcv", "mmengine", "monai",
    "oneflow", "paddle", "peft", "pytorch_lightning", "tensorflow", "timm", "torch", "torch_npu", "torch_xla", "torchao", "transformers", "trl",
    "unsloth", "xformers",
}  # fmt: skip


def resolve_exports(names: Names, calls: Mapping[str, Sequence[CallSite]]) -> None:
    """Enter the full names of what a module of the same project exports under torch's name, if it is called like torch's."""
    for local, full in names.table.items():
        module, _, name = full.rpartition(".")
        if name == local == "torch" and module:
            names.table[local] = "torch"  # `from ..compat import torch`
        if name not in _EXPORTED or local != name or full.partition(".")[0] in _LIBRARIES:
            continue
        sites = [call for call, _ in calls.get(name, ()) if isinstance(call.func, ast.Name)]
        passed = [{k.arg for k in call.keywords} for call in sites]
        if not module or not sites or any(call.args for call in sites):
            continue
        if name == "GradScaler":
            names.table[local] = "torch.amp.GradScaler"
        elif all(p and p <= _ARGUMENTS for p in passed):
            names.table[local] = _autocast(passed)


def resolve_stars(
    names: Names, statements: Iterable[ast.stmt], calls: Mapping[str, Sequence[CallSite]], bound: Container[str]
) -> None:
    """Enter torch's names that only a star import from the same project can bind: `from utils import *`, `with autocast():`."""
    if not any(isinstance(statement, ast.ImportFrom) and _is_star_of_project(statement) for statement in statements):
        return
    for name in _EXPORTED:
        sites = [call for call, _ in calls.get(name, ()) if isinstance(call.func, ast.Name)]
        if not sites or name in names.table or name in bound:
            continue
        if name == "GradScaler":
            names.table[name] = "torch.amp.GradScaler"
        elif all(k.arg in _ARGUMENTS for call in sites for k in call.keywords) and all(map(_names_device, sites)):
            named = [call.args or any(k.arg == "device_type" for k in call.keywords) for call in sites]
            names.table[name] = "torch.amp.autocast" if all(named) else OWN_AUTOCAST
    if "amp" not in names.table and "amp" not in bound and any(map(_is_of_amp, _apex_calls(calls))):
        names.table["amp"] = "apex.amp"


def _apex_calls(calls: Mapping[str, Sequence[CallSite]]) -> Iterable[ast.Call]:
    """The calls of functions that apex.amp has and torch.amp has not."""
    return (call for name in ("initialize", "scale_loss", "master_params") for call, _ in calls.get(name, ()))


def _is_of_amp(call: ast.Call) -> bool:
    """Whether a call is of a function of the module `amp`, by that name alone: `amp.scale_loss(...)`."""
    func = call.func
    return isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "amp"


def _is_star_of_project(statement: ast.ImportFrom) -> bool:
    package = (statement.module or "").partition(".")[0]
    return statement.names[0].name == "*" and (bool(statement.level) or package not in _LIBRARIES)


def _names_device(call: ast.Call) -> bool:
    """Whether the positional arguments of a call, if any, are those of torch's."""
    return all(isinstance(a, ast.Constant) and isinstance(a.value, str) for a in call.args[:1])


def _autocast(passed: Sequence[Collection[str | None]]) -> str:
    return "torch.amp.autocast" if all("device_type" in keywords for keywords in passed) else OWN_AUTOCAST
