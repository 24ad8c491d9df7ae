"""Lean SGD."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.kernels.layout import Rule
from halfstep.kernels.sgd import SGDSettings, sgd_update
from halfstep.optim.adopt import ADOPTS
from halfstep.optim.fused import FusedOptimizer
from halfstep.optim.settings import as_scalar, check_not_negative

__all__ = ["SGD"]


class SGD(FusedOptimizer):
    """SGD for 16-bit weights, with the arguments of torch.optim.SGD and `master=`, `states=`."""

    rule: ClassVar[Rule | None] = Rule.SGD
    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    counts_steps: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        master: str = "policy",
        states: str = "policy",
    ) -> None:
        check_not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise SettingError(
                f"nesterov needs momentum above 0 and no dampening, not momentum={momentum!r} and dampening={dampening!r}."
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, master=master, states=states)

    def settings(self, group: dict[str, Any]) -> SGDSettings:
        """A group's settings, for `update` and for the kernels."""
        names = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
        return SGDSettings(as_scalar(group["lr"]), *(group[name] for name in names))

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """A momentum buffer, where there is momentum."""
        return self.moments if group["momentum"] else ()

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One SGD step on fp32 tensors."""
        buffer = state.get("momentum_buffer")
        master, buffer = sgd_update(master, grad, buffer, state["step"], self.settings(group))
        if buffer is not None:
            state["momentum_buffer"] = buffer
        return master


ADOPTS[torch.optim.SGD] = SGD
