"""Lion for one tensor, in fp32: the readable reference of the fused step (Chen et al., 2023).

g = grad / grad_scale
d = beta1 m + (1 - beta1) g
p = p (1 - lr wd) - lr sign(d)
m = beta2 m + (1 - beta2) g
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["LionSettings", "lion_update"]


@dataclass(frozen=True)
class LionSettings:
    """The numbers of one Lion step; `lr` may be a tensor."""

    lr: float | Tensor
    betas: tuple[float, float]
    weight_decay: float
    maximize: bool = False


def lion_update(
    master: Tensor,  # fp32
    grad: Tensor,  # fp32, already divided by the scale
    exp_avg: Tensor,  # fp32
    how: LionSettings,
) -> tuple[Tensor, Tensor]:
    """The new master and moment."""
    beta1, beta2 = how.betas
    if how.maximize:
        grad = -grad
    direction = (exp_avg * beta1 + grad * (1 - beta1)).sign()
    master = master * (1 - how.lr * how.weight_decay) - direction * how.lr
    return master.float(), exp_avg * beta2 + grad * (1 - beta2)
