"""Lean Lion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from halfstep.kernels.layout import Rule
from halfstep.kernels.lion import LionSettings, lion_update
from halfstep.optim.fused import FusedOptimizer
from halfstep.optim.settings import as_scalar, check_betas, check_not_negative

__all__ = ["Lion"]


class Lion(FusedOptimizer):
    """Lion (Chen et al., 2023) for weights of any precision, with `master=`, `states=`; one moment instead of Adam's two.

    Its update is the sign of a moment, so it needs a learning rate 3 to 10 times lower than Adam's, and weight decay as
    many times higher.
    """

    rule: ClassVar[Rule | None] = Rule.LION
    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: str = "policy",
        states: str = "policy",
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, master=master, states=states)

    def settings(self, group: dict[str, Any]) -> LionSettings:
        """A group's settings, for `update` and for the kernels."""
        return LionSettings(as_scalar(group["lr"]), group["betas"], group["weight_decay"], group["maximize"])

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One Lion step on fp32 tensors."""
        master, state["exp_avg"] = lion_update(master, grad, state["exp_avg"], self.settings(group))
        return master
