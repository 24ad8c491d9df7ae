"""Adam and AdamW for one tensor, in fp32: the readable reference of the fused step.

    g      = grad / grad_scale                        unscale and clip, folded into one division
    p      = p (1 - lr wd)                            AdamW; Adam adds wd p to g instead
    m      = beta1 m + (1 - beta1) g
    v      = beta2 v + (1 - beta2) g^2
    p      = p - lr / (1 - beta1^t)  *  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The bias corrections are computed in float64: near the first steps 1 - beta2^t is a difference of almost
equal numbers, and computed in fp32 it is off by about 100 ulp.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["AdamColumn", "AdamSettings", "adamw_update"]


class AdamColumn(IntEnum):
    """Columns of a group's row in the kernels' float64 table of settings."""

    LR = 0
    BETA1 = 1
    BETA2 = 2
    EPS = 3
    WEIGHT_DECAY = 4
    DECOUPLED = 5
    MAXIMIZE = 6


@dataclass(frozen=True)
class AdamSettings:
    """The settings of one Adam step; `lr` may be a tensor."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW's weight decay, apart from the gradient
    maximize: bool = False
    amsgrad: bool = False

    def row(self) -> tuple[float, ...]:
        """The settings in the order of `AdamColumn`."""
        values = {
            AdamColumn.LR: self.lr,
            AdamColumn.BETA1: self.betas[0],
            AdamColumn.BETA2: self.betas[1],
            AdamColumn.EPS: self.eps,
            AdamColumn.WEIGHT_DECAY: self.weight_decay,
            AdamColumn.DECOUPLED: self.decoupled,
            AdamColumn.MAXIMIZE: self.maximize,
        }
        return tuple(float(values[column]) for column in AdamColumn)


def adamw_update(
    master: Tensor,  # fp32
    grad: Tensor,  # fp32, already divided by the scale
    exp_avg: Tensor,  # fp32
    exp_avg_sq: Tensor,  # fp32
    max_exp_avg_sq: Tensor | None,  # fp32, for amsgrad
    step: Tensor,  # 0-dim: the number of this step, from 1
    settings: AdamSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The new master, first moment, second moment and largest second moment."""
    beta1, beta2 = settings.betas
    wide = step.double()
    if settings.maximize:
        grad = -grad
    if settings.weight_decay:
        if settings.decoupled:
            master = master * (1 - settings.lr * settings.weight_decay)
        else:
            grad = grad + master * settings.weight_decay
    exp_avg = exp_avg * beta1 + grad * (1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * (1 - beta2)
    second = exp_avg_sq
    if settings.amsgrad and max_exp_avg_sq is not None:
        second = max_exp_avg_sq = torch.maximum(max_exp_avg_sq, exp_avg_sq)
    one_over_root = 1 / (1 - beta2**wide).sqrt()
    size = settings.lr / (1 - beta1**wide)
    master = master - exp_avg / (second.sqrt() * one_over_root + settings.eps) * size
    return master.float(), exp_avg, exp_avg_sq, max_exp_avg_sq
