"""torch's `autocast` and `GradScaler` that a project exports again: `from .nn.functional import autocast`.

A project does that to support several versions of torch. How the name is called shows which signature it has: with `device_type=` it is
torch.amp's. Without one the module may choose the device and the dtype, so that the region is known and its format is not.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence

from halfstep.check.script.syntax.names import Names
from halfstep.check.script.syntax.scope import CallSite

__all__ = ["OWN_AUTOCAST", "resolve_exports"]

OWN_AUTOCAST = "project.own.autocast"
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
        if name not in {"autocast", "GradScaler"} or local != name or full.partition(".")[0] in _LIBRARIES:
            continue
        sites = [call for call, _ in calls.get(name, ()) if isinstance(call.func, ast.Name)]
        passed = [{k.arg for k in call.keywords} for call in sites]
        if not module or not sites or any(call.args for call in sites):
            continue
        if name == "GradScaler":
            names.table[local] = "torch.amp.GradScaler"
        elif all(p and p <= _ARGUMENTS for p in passed):
            names.table[local] = _autocast(passed)


def _autocast(passed: Sequence[Collection[str | None]]) -> str:
    return "torch.amp.autocast" if all("device_type" in keywords for keywords in passed) else OWN_AUTOCAST
