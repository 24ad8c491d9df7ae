"""SGD with momentum for one tensor, in fp32: the readable reference of the fused step.

g = grad / grad_scale + wd p
b = momentum b + (1 - dampening) g        and b = g at the first step
p = p - lr (g + momentum b  if nesterov  else  b)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SGDSettings", "sgd_update"]


@dataclass(frozen=True)
class SGDSettings:
    """The numbers of one SGD step; `lr` may be a tensor."""

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool = False


def sgd_update(
    master: Tensor,  # fp32
    grad: Tensor,  # fp32, already divided by the scale
    buffer: Tensor | None,  # fp32, None without momentum
    step: Tensor,  # 0-dim: the number of this step, from 1
    how: SGDSettings,
) -> tuple[Tensor, Tensor | None]:
    """The new master and momentum buffer."""
    if how.maximize:
        grad = -grad
    if how.weight_decay:
        grad = grad + master * how.weight_decay
    direction = grad
    if buffer is not None:
        # The first gradient enters undamped, as in torch; `step` is on the device, so this is no branch.
        damped = torch.where(step <= 1, grad, buffer * how.momentum + grad * (1 - how.dampening))
        buffer = damped
        direction = grad + damped * how.momentum if how.nesterov else damped
    return (master - direction * how.lr).float(), buffer
