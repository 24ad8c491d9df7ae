"""Lean NAdam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.optim.adopt import ADOPTS
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.settings import as_scalar, check_betas, check_not_negative, decayed

__all__ = ["NAdam"]


class NAdam(LeanOptimizer):
    """NAdam for 16-bit weights, with the arguments of torch.optim.NAdam and `master=`, `states=`."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    unsigned: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq"})
    scalars: ClassVar[tuple[str, ...]] = ("mu_product",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        master: str = "policy",
        states: str = "policy",
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)
        check_betas(betas)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, master=master, states=states)

    def initial_value(self, group: dict[str, Any], name: str) -> float:
        """The product of momentum coefficients starts at 1, the moments at 0."""
        return 1.0 if name == "mu_product" else 0.0

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One NAdam step on fp32 tensors."""
        (beta1, beta2), lr, wide = group["betas"], as_scalar(group["lr"]), state["step"].double()
        master, grad = decayed(group, master, grad)
        mu = beta1 * (1 - 0.5 * 0.96 ** (wide * group["momentum_decay"]))
        mu_next = beta1 * (1 - 0.5 * 0.96 ** ((wide + 1) * group["momentum_decay"]))
        product = state["mu_product"] = (state["mu_product"] * mu).float()
        exp_avg = state["exp_avg"] = state["exp_avg"].lerp(grad, 1 - beta1)
        second = state["exp_avg_sq"] = (state["exp_avg_sq"] * beta2).addcmul(grad, grad, value=1 - beta2)
        denominator: Tensor = (second / (1 - beta2**wide)).sqrt() + group["eps"]
        size: Tensor = lr * (1 - mu) / (1 - product.double())
        next_size: Tensor = lr * mu_next / (1 - product.double() * mu_next)
        return master - grad / denominator * size - exp_avg / denominator * next_size


ADOPTS[torch.optim.NAdam] = NAdam
