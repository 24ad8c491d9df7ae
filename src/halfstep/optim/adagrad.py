"""Lean Adagrad."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.optim.adopt import ADOPTS
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.settings import as_scalar, check_not_negative, decayed

__all__ = ["Adagrad"]


class Adagrad(LeanOptimizer):
    """Adagrad for 16-bit weights, with the arguments of torch.optim.Adagrad and `master=`, `states=`."""

    moments: ClassVar[tuple[str, ...]] = ("sum",)
    unsigned: ClassVar[frozenset[str]] = frozenset({"sum"})
    unstorable: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"bf16": "a bf16 sum of squares stops growing once they are below 1/512 of it. Use states=fp32 or 8bit."}
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        master: str = "policy",
        states: str = "policy",
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        check_not_negative(**defaults)
        super().__init__(params, defaults | {"maximize": maximize}, master=master, states=states)

    def initial_value(self, group: dict[str, Any], name: str) -> float:
        """The sum starts at `initial_accumulator_value`, which torch takes from the constructor for every group."""
        return float(self.defaults["initial_accumulator_value"])

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One Adagrad step on fp32 tensors."""
        master, grad = decayed(group, master, grad)
        size: Tensor = as_scalar(group["lr"]) / (1 + (state["step"].double() - 1) * group["lr_decay"])
        total = state["sum"] = state["sum"].addcmul(grad, grad)
        root: Tensor = total.sqrt() + group["eps"]
        return master - grad / root * size


ADOPTS[torch.optim.Adagrad] = Adagrad
