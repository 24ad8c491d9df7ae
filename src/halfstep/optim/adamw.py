"""Lean Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.kernels.adamw import AdamSettings, adamw_update
from halfstep.kernels.layout import Rule
from halfstep.optim.adopt import ADOPTS
from halfstep.optim.fused import FusedOptimizer
from halfstep.optim.settings import as_scalar, check_betas, check_not_negative

__all__ = ["Adam", "AdamW"]


class AdamW(FusedOptimizer):
    """AdamW for 16-bit weights, with the arguments of torch.optim.AdamW and `master=`, `states=`."""

    rule: ClassVar[Rule | None] = Rule.ADAM
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    unsigned: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq", "max_exp_avg_sq"})
    decoupled: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
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
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, defaults, master=master, states=states)

    def settings(self, group: dict[str, Any]) -> AdamSettings:
        """A group's settings, for `update` and for the kernels."""
        return AdamSettings(
            as_scalar(group["lr"]),
            group["betas"],
            group["eps"],
            group["weight_decay"],
            group.get("decoupled_weight_decay", self.decoupled),
            group["maximize"],
            group["amsgrad"],
        )

    @classmethod
    def check_states(cls, group: dict[str, Any], states: str) -> None:
        """The largest second moment of amsgrad would be rounded up at random, step after step."""
        if group["amsgrad"] and states == "8bit":
            raise SettingError(
                "amsgrad needs the largest second moment, which 8 bits cannot store; use states=fp32 or bf16 with it."
            )

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """First and second moment, and for amsgrad the largest second."""
        return self.moments if group["amsgrad"] else self.moments[:2]

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One Adam step on fp32 tensors."""
        largest = state.get("max_exp_avg_sq")
        master, state["exp_avg"], state["exp_avg_sq"], largest = adamw_update(
            master, grad, state["exp_avg"], state["exp_avg_sq"], largest, state["step"], self.settings(group)
        )
        if largest is not None:
            state["max_exp_avg_sq"] = largest
        return master


class Adam(AdamW):
    """Adam for 16-bit weights, with the arguments of torch.optim.Adam and `master=`, `states=`."""

    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        master: str = "policy",
        states: str = "policy",
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, master=master, states=states)


ADOPTS[torch.optim.AdamW] = AdamW
ADOPTS[torch.optim.Adam] = Adam
