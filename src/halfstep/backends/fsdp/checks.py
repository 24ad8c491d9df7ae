"""What the FSDP2 backend rejects before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.backends.fsdp.groups import Groups, Unit
from halfstep.errors import SettingError
from halfstep.hardware.units import few
from halfstep.precision.formats import format_name
from halfstep.precision.policy import Policy

__all__ = ["check_groups", "check_launched", "check_shardable"]


def check_launched() -> None:
    """Raise unless this process is one of a torch.distributed run."""
    if not (dist.is_available() and dist.is_initialized()):
        raise SettingError(
            'backend="fsdp" needs a process group. Start the script with torchrun and call torch.distributed.init_process_group() '
            "before the Engine is built."
        )


def check_shardable(model: nn.Module, units: Sequence[nn.Module], mesh: Any) -> None:
    """Raise for what `fully_shard` would reject, some of it after other modules are sharded already."""
    names = {id(module): name for name, module in model.named_modules()}
    containers = [names[id(m)] for m in units if type(m).forward is nn.Module.forward]
    if containers:
        raise SettingError(
            f"FSDP(shard=...) names {few(containers)}, which has no forward of its own: parameters are gathered when a module is called. Name what "
            f"is in it, such as {containers[0]!r} + '.*'."
        )
    if mesh is not None and mesh.ndim not in (1, 2):
        raise SettingError(
            f"FSDP(mesh=...) has {mesh.ndim} dimensions; one shards, and of two the first replicates. Shard the model with fully_shard yourself to "
            "use it next to other kinds of parallelism."
        )
    scattered = [name for name, p in model.named_parameters() if not p.is_contiguous()]
    if scattered:
        raise SettingError(
            f"FSDP2 shards contiguous parameters only, and {len(scattered)} are not: {few(scattered)}. Write "
            "model.to(memory_format=torch.contiguous_format) before the optimizer is built; inputs may stay channels_last."
        )


def check_groups(groups: Groups, policy: Policy, fp32: Iterable[Tensor]) -> None:
    """Raise for settings of `fully_shard` that contradict the policy; `fp32` are the parameters that it does not round."""
    unrounded = set(map(id, fp32))
    for unit in groups.units:
        where = f"fully_shard of {unit.name or 'the model'}"
        _check_precision(unit, policy, where)
        if type(unit.group.offload_policy).__name__ == "CPUOffloadPolicy":
            raise SettingError(
                f"{where} has CPUOffloadPolicy, which the Engine does not support: parameters would be on the CPU while the model computes "
                "on another device. Omit offload_policy; lean presets and states=8bit make shards smaller."
            )
        if unit.group.gradient_divide_factor is not None:
            raise SettingError(
                f"{where} has set_gradient_divide_factor({unit.group.gradient_divide_factor}), but the Engine averages gradients over ranks and "
                "divides them by the window's weight. Remove it; backward(loss, weight=...) weighs micro-batches."
            )
        if policy.params != "fp32":
            _check_uniform(unit, policy, unrounded, where)
            _check_not_run(unit, policy, unrounded, where)


def _check_precision(unit: Unit, policy: Policy, where: str) -> None:
    settings = unit.group.mp_policy
    meant = {
        "param_dtype": (policy.params, f"gathers weights as it stores them, in {policy.params}"),
        "reduce_dtype": (policy.reduce, f"reduces gradients in {policy.reduce}"),
        "output_dtype": (None, "leaves the outputs of modules as they are"),
    }
    for name, (wanted, text) in meant.items():
        own = getattr(settings, name)
        if own is not None and format_name(own) != wanted:
            raise SettingError(
                f"{where} has MixedPrecisionPolicy({name}={format_name(own)}), but the precision {policy} {text}. Omit mp_policy: the Engine's "
                "precision= decides what is stored, computed and reduced in which format."
            )


def _check_not_run(unit: Unit, policy: Policy, unrounded: set[int], where: str) -> None:
    """Raise for fp32 weights that a forward has gathered: their buffers have that dtype."""
    has_run = any(hasattr(p, "_unsharded_param") for p in unit.group.fsdp_params)
    if has_run and any(p.dtype is torch.float32 and id(p) not in unrounded for p in unit.params):
        raise SettingError(
            f"{where}: the model has run before the Engine was built, and FSDP2 has buffers for its fp32 weights, which {policy} rounds to "
            f"{policy.params}. Build the Engine before the first forward."
        )


def _check_uniform(unit: Unit, policy: Policy, unrounded: set[int], where: str) -> None:
    """Raise for a unit with 16-bit and fp32 weights, which FSDP2 cannot reduce together."""
    fp32 = [p for p in unit.trained if id(p) in unrounded]
    if not fp32 or len(fp32) == len(unit.trained):
        return
    names = [f"shape {tuple(p.shape)}" for p in fp32]
    if unit.group.fsdp_params[0].sharded_param is not None:
        names = [p._module_info.param_name for p in unit.group.fsdp_params if id(p.sharded_param) in unrounded]  # noqa: SLF001
    raise SettingError(
        f"{where} has {len(fp32)} weights that stay fp32 under {policy} ({few(names)}) among 16-bit ones, and FSDP2 reduces weights of one "
        "dtype together. Call fully_shard on their modules (batch norms, those of keep_fp32) before the modules around them, or let the "
        'Engine shard the model (backend="fsdp").'
    )
