"""Lean Rprop: resilient backpropagation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.optim.adopt import ADOPTS
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.settings import check_not_negative

__all__ = ["Rprop"]


class Rprop(LeanOptimizer):
    """Rprop for 16-bit weights, with the arguments of torch.optim.Rprop and `master=`, `states=`."""

    moments: ClassVar[tuple[str, ...]] = ("prev", "step_size")
    unstorable: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"8bit": "step sizes in one block differ by up to 5e7, and a block has one scale. Use states=fp32 or bf16."}
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50),
        *,
        maximize: bool = False,
        master: str = "policy",
        states: str = "policy",
    ) -> None:
        check_not_negative(lr=lr)
        if not 0 < etas[0] < 1 < etas[1]:
            raise SettingError(f"etas={etas!r} must be a factor between 0 and 1 and one above 1.")
        defaults = {"lr": lr, "etas": etas, "step_sizes": step_sizes, "maximize": maximize}
        super().__init__(params, defaults, master=master, states=states)

    def initial_value(self, group: dict[str, Any], name: str) -> float:
        """Step sizes start at the learning rate."""
        return float(group["lr"]) if name == "step_size" else 0.0

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One Rprop step on fp32 tensors."""
        shrink, grow = group["etas"]
        if group["maximize"]:
            grad = -grad
        agreement = grad * state["prev"]
        reversed_sign = agreement < 0
        size = torch.where(agreement > 0, state["step_size"] * grow, state["step_size"])
        size = torch.where(reversed_sign, state["step_size"] * shrink, size).clamp(*group["step_sizes"])
        grad = torch.where(reversed_sign, torch.zeros_like(grad), grad)
        state["prev"], state["step_size"] = grad, size
        return master - grad.sign() * size


ADOPTS[torch.optim.Rprop] = Rprop
