"""Lion for one tensor, in fp32: the readable reference of the fused step (Chen et al., 2023).

g = grad / grad_scale
d = beta1 m + (1 - beta1) g
p = p (1 - lr wd) - lr sign(d)
m = beta2 m + (1 - beta2) g
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

__all__ = ["LionColumn", "LionSettings", "lion_update"]


class LionColumn(IntEnum):
    """Columns of a group's row in the kernels' float64 table of settings."""

    LR = 0
    BETA1 = 1
    BETA2 = 2
    WEIGHT_DECAY = 3
    MAXIMIZE = 4


@dataclass(frozen=True)
class LionSettings:
    """The settings of one Lion step; `lr` may be a tensor."""

    lr: float | Tensor
    betas: tuple[float, float]
    weight_decay: float
    maximize: bool = False

    def row(self) -> tuple[float, ...]:
        """The settings in the order of `LionColumn`."""
        values = {
            LionColumn.LR: self.lr,
            LionColumn.BETA1: self.betas[0],
            LionColumn.BETA2: self.betas[1],
            LionColumn.WEIGHT_DECAY: self.weight_decay,
            LionColumn.MAXIMIZE: self.maximize,
        }
        return tuple(float(values[column]) for column in LionColumn)


def lion_update(
    master: Tensor,  # fp32
    grad: Tensor,  # fp32, already divided by the scale
    exp_avg: Tensor,  # fp32
    settings: LionSettings,
) -> tuple[Tensor, Tensor]:
    """The new master and moment."""
    beta1, beta2 = settings.betas
    if settings.maximize:
        grad = -grad
    direction = (exp_avg * beta1 + grad * (1 - beta1)).sign()
    master = master * (1 - settings.lr * settings.weight_decay) - direction * settings.lr
    return master.float(), exp_avg * beta2 + grad * (1 - beta2)
