"""SGD with momentum for one tensor, in fp32: the readable reference of the fused step.

g = grad / grad_scale + wd p
b = momentum b + (1 - dampening) g        and b = g at the first step
p = p - lr (g + momentum b  if nesterov  else  b)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["SGDColumn", "SGDSettings", "sgd_update"]


class SGDColumn(IntEnum):
    """Columns of a group's row in the kernels' float64 table of settings."""

    LR = 0
    MOMENTUM = 1
    DAMPENING = 2
    WEIGHT_DECAY = 3
    NESTEROV = 4
    MAXIMIZE = 5
    HAS_MOMENTUM = 6


@dataclass(frozen=True)
class SGDSettings:
    """The settings of one SGD step; `lr` may be a tensor."""

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool = False

    def row(self) -> tuple[float, ...]:
        """The settings in the order of `SGDColumn`."""
        values = {
            SGDColumn.LR: self.lr,
            SGDColumn.MOMENTUM: self.momentum,
            SGDColumn.DAMPENING: self.dampening,
            SGDColumn.WEIGHT_DECAY: self.weight_decay,
            SGDColumn.NESTEROV: self.nesterov,
            SGDColumn.MAXIMIZE: self.maximize,
            SGDColumn.HAS_MOMENTUM: bool(self.momentum),
        }
        return tuple(float(values[column]) for column in SGDColumn)


def sgd_update(
    master: Tensor,  # fp32
    grad: Tensor,  # fp32, already divided by the scale
    buffer: Tensor | None,  # fp32, None without momentum
    step: Tensor,  # 0-dim: the number of this step, from 1
    settings: SGDSettings,
) -> tuple[Tensor, Tensor | None]:
    """The new master and momentum buffer."""
    if settings.maximize:
        grad = -grad
    if settings.weight_decay:
        grad = grad + master * settings.weight_decay
    direction = grad
    if buffer is not None:
        # The first gradient enters undamped, as in torch; `step` is on the device, so no branch on the host.
        damped = torch.where(step <= 1, grad, buffer * settings.momentum + grad * (1 - settings.dampening))
        buffer = damped
        direction = grad + damped * settings.momentum if settings.nesterov else damped
    return (master - direction * settings.lr).float(), buffer
