"""What the DeepSpeed backend rejects before anything is changed, each with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.errors import SettingError
from halfstep.events import log_once, log_warning
from halfstep.hardware.units import few
from halfstep.optim.lean import LeanOptimizer
from halfstep.precision.policy import Policy

__all__ = ["adapt_policy", "check_launched", "check_model", "check_optimizers", "check_options"]

# Rules that treat each element alone, so that a flat part of several parameters is stepped as the whole ones are.
_ELEMENTWISE = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip


def check_launched() -> None:
    """Raise unless this process is one of a torch.distributed run."""
    if not (dist.is_available() and dist.is_initialized()):
        raise SettingError(
            'backend="deepspeed" needs a process group. Start the script with torchrun and call torch.distributed.init_process_group() '
            "before the Engine is built."
        )


def adapt_policy(policy: Policy, stage: int) -> Policy:
    """The policy as DeepSpeed stores it: 16-bit weights have an fp32 copy, divided over the ranks."""
    if policy.states != "fp32":
        raise SettingError(
            f'states={policy.states} does not work with backend="deepspeed", whose optimizer states are fp32, 1/N of them on each of N ranks. '
            'Use states=fp32, or backend="fsdp".'
        )
    if policy.grads not in {"auto", "fp32"}:
        raise SettingError(
            f'grads={policy.grads} does not work with backend="deepspeed", which adds gradients up in fp32. Omit grads=.'
        )
    if not policy.is_lean:
        return policy
    if policy.master == "none":
        raise SettingError('master=none does not work with backend="deepspeed": ZeRO steps fp32 masters. Omit master=.')
    if policy.keep_fp32:
        raise SettingError(
            f'keep_fp32={"|".join(policy.keep_fp32)} does not work with backend="deepspeed" in {policy.params}-lean: DeepSpeed stores all weights in '
            f'{policy.params}. Use precision="{policy.params}", whose weights are fp32, or backend="fsdp".'
        )
    if policy.master == "fp32":
        return policy
    adapted = dataclasses.replace(policy, master="fp32")
    log_once(
        f"backend=deepspeed: precision {policy} runs as {adapted}. ZeRO-{stage} divides the fp32 masters over the ranks."
    )
    return adapted


def check_model(module: nn.Module, policy: Policy, fp32: Sequence[Tensor]) -> None:
    """Raise for parameters that DeepSpeed would store otherwise than the policy."""
    names = {id(p): name for name, p in module.named_parameters()}
    if policy.is_lean and fp32:
        kept_names = [names[id(p)] for p in fp32 if id(p) in names]
        raise SettingError(
            f"{few(kept_names)} stay in fp32 under {policy} (batch norms), and DeepSpeed stores all weights in {policy.params}. Use "
            f'precision="{policy.params}", whose weights are fp32, or backend="fsdp".'
        )
    if any(hasattr(p, "ds_id") for p in module.parameters()):
        raise SettingError(
            "The model was built inside deepspeed.zero.Init or belongs to a DeepSpeed engine. Build it without, and let the Engine partition it."
        )
    scalars = [name for name, p in module.named_parameters() if p.requires_grad and not p.is_floating_point()]
    if scalars:
        raise SettingError(f"DeepSpeed trains floating-point parameters only, and {few(scalars)} are not.")
    sparse = [name for name, m in module.named_modules() if getattr(m, "sparse", False) is True]
    if sparse:
        raise SettingError(f"ZeRO does not partition sparse gradients: {few(sparse)}. Build them with sparse=False.")


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], config: Mapping[str, Any]) -> None:
    """Raise for optimizers that would compute something else on flat parts of several parameters."""
    if len(optimizers) != 1:
        raise SettingError(
            f"DeepSpeed steps one optimizer, and this Engine has {len(optimizers)}. Put the parameters into groups of one optimizer."
        )
    (optimizer,) = optimizers
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Adagrad):
        raise SettingError(
            "DeepSpeed builds Adagrad again from its defaults: settings of groups and schedulers would have no effect. Use another optimizer."
        )
    if optimizer.state:
        raise SettingError(
            f"{name} already has a state, of parameters that are not partitioned. Load a checkpoint with Engine.load after Engine(...)."
        )
    if isinstance(optimizer, LeanOptimizer):
        raise SettingError(
            f'halfstep.optim.{name} does not work with backend="deepspeed", which has masters of its own and needs states of the size of its '
            f"partitions. Use torch.optim.{name if hasattr(torch.optim, name) else 'AdamW'}."
        )
    if type(optimizer) in _ELEMENTWISE:
        return
    if not config.get("zero_allow_untested_optimizer"):
        raise SettingError(
            f"{name} would be stepped on flat 1/N parts of all parameters: a rule that looks at a whole tensor (LAMB, LARS, Adafactor, Muon) "
            "computes something else there. If its rule treats each element alone, add zero_allow_untested_optimizer=true to the "
            'configuration; else use backend="fsdp".'
        )
    log_warning(
        f"{name} is stepped on flat 1/N parts of all parameters (zero_allow_untested_optimizer). Compare a short run with one process first."
    )


def check_options(settings: Mapping[str, Any], policy: Policy, stage: int) -> None:
    """Raise for options of the Engine that ZeRO cannot carry out."""
    if settings.get("compile"):
        raise SettingError(
            f'compile={settings["compile"]!r} does not work with backend="deepspeed": hooks of ZeRO gather and reduce inside the model, and a compiled '
            'graph would break at each. Use backend="fsdp" with compile="blocks".'
        )
    if settings.get("ema") is not None and (policy.is_lean or stage == 3):
        where = "stage 3 partitions the weights" if stage == 3 else f"{policy} has its fp32 masters in partitions"
        raise SettingError(
            f"ema= does not work here: {where}, and the EMA follows whole fp32 weights. Use stage 1 or 2 with fp32 weights (precision=fp32, "
            'bf16 or fp16), or backend="fsdp".'
        )
