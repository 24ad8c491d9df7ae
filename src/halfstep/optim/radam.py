"""Lean RAdam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.optim.adopt import ADOPTS
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.settings import as_scalar, check_betas, check_not_negative, decayed

__all__ = ["RAdam"]


class RAdam(LeanOptimizer):
    """RAdam for 16-bit weights, with the arguments of torch.optim.RAdam and `master=`, `states=`."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    unsigned: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        master: str = "policy",
        states: str = "policy",
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, master=master, states=states)

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One RAdam step on fp32 tensors."""
        (beta1, beta2), lr, wide = group["betas"], as_scalar(group["lr"]), state["step"].double()
        master, grad = decayed(group, master, grad)
        exp_avg = state["exp_avg"] = state["exp_avg"].lerp(grad, 1 - beta1)
        second = state["exp_avg_sq"] = (state["exp_avg_sq"] * beta2).addcmul(grad, grad, value=1 - beta2)
        correction = 1 - beta2**wide
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * wide * beta2**wide / correction  # of the average that the second moment is
        ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        adaptive: Tensor = ratio.clamp(min=0).sqrt() * correction.sqrt() / (second.sqrt() + group["eps"])
        # The step count is on the device, so no branch on the host.
        factor: Tensor = lr * torch.where(length > 5, adaptive, torch.ones_like(adaptive))
        first: Tensor = exp_avg / (1 - beta1**wide)
        return master - first * factor


ADOPTS[torch.optim.RAdam] = RAdam
