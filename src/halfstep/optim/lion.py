"""Lean Lion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from halfstep.errors import SettingError
from halfstep.kernels.lion import LionSettings, lion_update
from halfstep.optim.lean import LeanOptimizer

__all__ = ["Lion"]


class Lion(LeanOptimizer):
    """Lion (Chen et al., 2023) for weights of any precision, with `master=`, `states=`; one moment instead of Adam's two.

    Its update is the sign of a moment, so it wants a learning rate 3 to 10 times below Adam's, and as much more decay.
    """

    rule: ClassVar[str] = "lion"
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
        if not lr >= 0 or not weight_decay >= 0:
            raise SettingError(f"lr={lr!r} and weight_decay={weight_decay!r} must be 0 or more.")
        if not all(0 <= beta < 1 for beta in betas):
            raise SettingError(f"betas={betas!r} must lie in [0, 1).")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, master=master, states=states)

    def settings(self, group: dict[str, Any]) -> tuple[float, ...]:
        """A group's row of the kernels' table of settings."""
        beta1, beta2 = (float(b) for b in group["betas"])
        return (float(group["lr"]), beta1, beta2, float(group["weight_decay"]), float(group["maximize"]), 0.0, 0.0)

    def names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The one moment."""
        return self.moments

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One Lion step on fp32 tensors."""
        how = LionSettings(group["lr"], group["betas"], group["weight_decay"], group["maximize"])
        master, state["exp_avg"] = lion_update(master, grad, state["exp_avg"], how)
        return master
