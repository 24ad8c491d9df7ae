"""Lean RMSprop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.optim.adopt import ADOPTS
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.settings import as_scalar, check_not_negative, decayed

__all__ = ["RMSprop"]


class RMSprop(LeanOptimizer):
    """RMSprop for 16-bit weights, with the arguments of torch.optim.RMSprop and `master=`, `states=`."""

    moments: ClassVar[tuple[str, ...]] = ("square_avg", "momentum_buffer", "grad_avg")
    unsigned: ClassVar[frozenset[str]] = frozenset({"square_avg"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
        master: str = "policy",
        states: str = "policy",
    ) -> None:
        check_not_negative(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
            "maximize": maximize,
        }
        super().__init__(params, defaults, master=master, states=states)

    @classmethod
    def check_states(cls, group: dict[str, Any], states: str) -> None:
        """`centered` subtracts two moments that nearly cancel: rounded ones could differ by less than nothing."""
        if group["centered"] and states != "fp32":
            raise SettingError(
                f"RMSprop(centered=True) takes the root of a difference of two moments, which states={states} could round to "
                "below 0; use states=fp32 with it."
            )

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The average of squares; a buffer where there is momentum; the average of gradients where it is centered."""
        needed = {"square_avg": True, "momentum_buffer": group["momentum"] > 0, "grad_avg": group["centered"]}
        return tuple(name for name in self.moments if needed[name])

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One RMSprop step on fp32 tensors."""
        lr, alpha = as_scalar(group["lr"]), group["alpha"]
        master, grad = decayed(group, master, grad)
        square_avg = state["square_avg"] = (state["square_avg"] * alpha).addcmul(grad, grad, value=1 - alpha)
        if group["centered"]:
            mean = state["grad_avg"] = state["grad_avg"].lerp(grad, 1 - alpha)
            square_avg = square_avg.addcmul(mean, mean, value=-1)
        direction: Tensor = grad / (square_avg.sqrt() + group["eps"])
        if group["momentum"] > 0:
            direction = state["momentum_buffer"] = state["momentum_buffer"] * group["momentum"] + direction
        return master - direction * lr


ADOPTS[torch.optim.RMSprop] = RMSprop
