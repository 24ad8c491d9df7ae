"""Lean Adadelta."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.optim.adopt import ADOPTS
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.settings import as_scalar, check_not_negative, decayed

__all__ = ["Adadelta"]


class Adadelta(LeanOptimizer):
    """Adadelta for 16-bit weights, with the arguments of torch.optim.Adadelta and `master=`, `states=`."""

    moments: ClassVar[tuple[str, ...]] = ("square_avg", "acc_delta")
    unsigned: ClassVar[frozenset[str]] = frozenset({"square_avg", "acc_delta"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: str = "policy",
        states: str = "policy",
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        if not 0 <= rho <= 1:
            raise SettingError(f"rho={rho!r} must lie in [0, 1].")
        defaults = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, master=master, states=states)

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One Adadelta step on fp32 tensors."""
        rho, eps = group["rho"], group["eps"]
        master, grad = decayed(group, master, grad)
        square_avg = state["square_avg"] = (state["square_avg"] * rho).addcmul(grad, grad, value=1 - rho)
        delta: Tensor = (state["acc_delta"] + eps).sqrt() / (square_avg + eps).sqrt() * grad
        state["acc_delta"] = (state["acc_delta"] * rho).addcmul(delta, delta, value=1 - rho)
        return master - delta * as_scalar(group["lr"])


ADOPTS[torch.optim.Adadelta] = Adadelta
