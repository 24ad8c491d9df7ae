"""Lean Adamax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.optim.adopt import ADOPTS
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.settings import as_scalar, check_betas, check_not_negative, decayed

__all__ = ["Adamax"]


class Adamax(LeanOptimizer):
    """Adamax for 16-bit weights, with the arguments of torch.optim.Adamax and `master=`, `states=`."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_inf")
    unsigned: ClassVar[frozenset[str]] = frozenset({"exp_inf"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: str = "policy",
        states: str = "policy",
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, master=master, states=states)

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One Adamax step on fp32 tensors."""
        beta1, beta2 = group["betas"]
        master, grad = decayed(group, master, grad)
        exp_avg = state["exp_avg"] = state["exp_avg"].lerp(grad, 1 - beta1)
        exp_inf = state["exp_inf"] = torch.maximum(state["exp_inf"] * beta2, grad.abs() + group["eps"])
        size: Tensor = as_scalar(group["lr"]) / (1 - beta1 ** state["step"].double())
        return master - exp_avg / exp_inf * size


ADOPTS[torch.optim.Adamax] = Adamax
