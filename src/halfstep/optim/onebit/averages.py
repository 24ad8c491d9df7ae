"""The arithmetic that the compressed optimizers share: Adam's averages, and their optional bias correction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.errors import SettingError

__all__ = ["corrected", "denominator", "next_moments", "next_momentum", "reject_amsgrad"]


def reject_amsgrad(name: str, *, amsgrad: bool) -> None:
    """Raise for amsgrad."""
    if amsgrad:
        raise SettingError(
            f"{name} does not support amsgrad: the variance is frozen, so it has no maximum to follow. Leave it out."
        )


def next_moments(group: dict[str, Any], state: dict[str, Tensor], grad: Tensor) -> tuple[Tensor, Tensor]:
    """Adam's two averages with one more gradient."""
    beta2 = group["betas"][1]
    return next_momentum(group, state, grad), (state["exp_avg_sq"] * beta2).addcmul_(grad, grad, value=1 - beta2)


def next_momentum(group: dict[str, Any], state: dict[str, Tensor], grad: Tensor) -> Tensor:
    """Adam's first average with one more gradient."""
    beta1: float = group["betas"][0]
    return (state["exp_avg"] * beta1).add_(grad, alpha=1 - beta1)


def denominator(group: dict[str, Any], exp_avg_sq: Tensor, updates: float | Tensor) -> Tensor:
    """sqrt(v) + eps, with v corrected for its number of updates if the group asks for it."""
    root = exp_avg_sq.sqrt()
    if group["bias_correction"]:
        root = root * _factor(group["betas"][1], updates).rsqrt().to(root.device, torch.float32)
    denominators: Tensor = root + group["eps"]
    return denominators


def corrected(group: dict[str, Any], exp_avg: Tensor, step: Tensor) -> Tensor:
    """m, corrected for the number of steps if the group asks for it."""
    return exp_avg / _factor(group["betas"][0], step).float() if group["bias_correction"] else exp_avg


def _factor(beta: float, updates: float | Tensor) -> Tensor:
    factor: Tensor = 1 - beta ** torch.as_tensor(updates).double()
    return factor
