"""The compressed optimizers from the `optimizer` block of a DeepSpeed configuration.

DeepSpeed has removed them (0.19.7), so a file that names one does not run there any more; this is how it runs here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from halfstep.errors import SettingError, unknown
from halfstep.events import log_info
from halfstep.optim.onebit.adam import OneBitAdam
from halfstep.optim.onebit.base import OneBitOptimizer
from halfstep.optim.onebit.lamb import OneBitLamb
from halfstep.optim.onebit.zero_one import ZeroOneAdam

__all__ = ["from_deepspeed"]

_CLASSES: dict[str, type[OneBitOptimizer]] = {
    "onebitadam": OneBitAdam,
    "zerooneadam": ZeroOneAdam,
    "onebitlamb": OneBitLamb,
}
_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad")
_FREEZE = (*_ADAM, "freeze_step")
_LAMB = (*_FREEZE, "max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
_ZERO_ONE = (*_ADAM, "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
_PASSED = {OneBitAdam: _FREEZE, ZeroOneAdam: _ZERO_ONE, OneBitLamb: _LAMB}
_TRANSPORT = ("comm_backend_name", "cuda_aware")  # cupy, MPI and HCCL there; torch.distributed here
_WITHOUT_EFFECT = ("bias_correction", "eps_inside_sqrt", "max_grad_norm")


def from_deepspeed(block: Mapping[str, Any], params: Iterable[Any], **settings: Any) -> OneBitOptimizer:
    """The optimizer of a DeepSpeed `optimizer` block: {"type": "OneBitAdam", "params": {...}}.

    `settings` are Halfstep's own arguments (`process_group`, `allow_unverified`, `master`, ...), or replace values of the block.
    """
    name = block.get("type")
    kind = _CLASSES.get(str(name).lower())
    if kind is None:
        raise unknown(
            "optimizer type", name, [each.__name__ for each in _CLASSES.values()], "For others use Engine(...)."
        )
    values = dict(block.get("params") or {})
    for key in [key for key, value in values.items() if value == "auto" and key != "freeze_step"]:
        raise SettingError(f"optimizer.params.{key} is 'auto', which transformers fills in; write its value.")
    _drop_transport(values)
    _drop_without_effect(values, settings)
    passed = {key: values.pop(key) for key in _PASSED[kind] if key in values}
    if values:
        raise unknown(f"parameter of {kind.__name__}", next(iter(values)), _PASSED[kind])
    if "betas" in passed:
        passed["betas"] = tuple(passed["betas"])
    return kind(params, **(passed | settings))


def _drop_transport(values: dict[str, Any]) -> None:
    dropped = {key: values.pop(key) for key in _TRANSPORT if key in values}
    if dropped:
        text = ", ".join(f"{key}={value!r}" for key, value in dropped.items())
        log_info(f"{text} is not needed: messages are those of torch.distributed, NCCL or gloo.")


def _drop_without_effect(values: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Keys that DeepSpeed reads and never uses, or rejects itself."""
    if values.get("max_grad_norm"):
        raise SettingError(
            f"optimizer.params.max_grad_norm={values['max_grad_norm']!r}: DeepSpeed rejects it and never clipped by it. Remove it, and set "
            "Engine(max_norm=...)."
        )
    if values.get("eps_inside_sqrt"):
        raise SettingError("optimizer.params.eps_inside_sqrt: DeepSpeed never used it, and it is not here. Remove it.")
    if values.get("bias_correction") and "bias_correction" not in settings:
        log_info(
            "bias_correction=true of the file is left out: DeepSpeed reads it and never uses it. Pass "
            "from_deepspeed(..., bias_correction=True) to correct the bias."
        )
    for key in _WITHOUT_EFFECT:
        values.pop(key, None)
