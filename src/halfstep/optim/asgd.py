"""Lean ASGD: averaged stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.optim.adopt import ADOPTS
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.settings import as_scalar, check_not_negative, decayed

__all__ = ["ASGD"]


class ASGD(LeanOptimizer):
    """ASGD for 16-bit weights, with the arguments of torch.optim.ASGD and `master=`; `state[p]["ax"]` is the average."""

    moments: ClassVar[tuple[str, ...]] = ("ax",)
    scalars: ClassVar[tuple[str, ...]] = ("eta", "mu")  # of the next step: the rate, and the weight in the average
    unstorable: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(("bf16", "8bit"), "its average of the weights would be rounded at every step. Use states=fp32.")
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: str = "policy",
        states: str = "policy",
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "lambd": lambd,
            "alpha": alpha,
            "t0": t0,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, master=master, states=states)

    def initial_value(self, group: dict[str, Any], name: str) -> float:
        """The first step has the group's rate and makes the average a copy of the weights."""
        return {"eta": float(group["lr"]), "mu": 1.0}.get(name, 0.0)

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One ASGD step on fp32 tensors."""
        lambd, lr, eta, mu = group["lambd"], as_scalar(group["lr"]), state["eta"], state["mu"]
        wide = state["step"].double()
        master, grad = decayed(group, master, grad)
        master = master * (1 - lambd * eta.double()) - grad * eta
        average = state["ax"]
        state["ax"] = torch.where(mu == 1, master, average + (master - average) * mu)
        state["eta"] = (lr / (1 + lambd * lr * wide) ** group["alpha"]).float()
        state["mu"] = (1 / (wide - group["t0"]).clamp(min=1)).float()
        return master


ADOPTS[torch.optim.ASGD] = ASGD
