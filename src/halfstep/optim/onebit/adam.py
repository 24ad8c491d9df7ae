"""1-bit Adam (Tang et al., arXiv 2102.02888).

    dense steps         m = beta1 m + (1 - beta1) g                 g: the mean over ranks
                        v = beta2 v + (1 - beta2) g^2
    compressed steps    m = compressed mean of beta1 m + (1 - beta1) g_i; v stays what it was
    both                p = p - lr (m / (sqrt(v) + eps) + weight_decay p)

There is no bias correction by default, as in the paper's runs and in DeepSpeed (which reads `bias_correction` and never uses it). With
it m is divided by 1 - beta1^t and v by 1 - beta2^T, where T is the last step at which v changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from halfstep.optim.onebit.averages import corrected, denominator, next_moments, next_momentum, reject_amsgrad
from halfstep.optim.onebit.base import Member
from halfstep.optim.onebit.freezing import FreezingOptimizer
from halfstep.optim.settings import as_scalar, check_betas, check_not_negative

__all__ = ["OneBitAdam"]


class OneBitAdam(FreezingOptimizer):
    """1-bit Adam with DeepSpeed's arguments, `freeze_step="auto"`, and `master=` for 16-bit weights.

    Group settings: `exp_avg_mask` (zeros where the momentum is always zero) and `non_freeze=True` (dense Adam for good).
    """

    title = "1-bit Adam"
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "worker_error")
    unsigned: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        freeze_step: int | str = 100_000,
        bias_correction: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        freeze_threshold: float = 0.96,
        process_group: Any = None,
        local_gradients: bool = True,
        compute: str | None = None,
        allow_unverified: bool = False,
        deepspeed_compat: bool = False,
        master: str = "policy",
        states: str = "policy",
    ) -> None:
        reject_amsgrad(type(self).__name__, amsgrad=amsgrad)
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(
            params,
            defaults,
            freeze_step=freeze_step,
            freeze_threshold=freeze_threshold,
            master=master,
            states=states,
            process_group=process_group,
            local_gradients=local_gradients,
            compute=compute,
            allow_unverified=allow_unverified,
            deepspeed_compat=deepspeed_compat,
        )

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One step of Adam on the mean of the gradients."""
        state["exp_avg"], state["exp_avg_sq"] = next_moments(group, state, grad)
        return self._moved(group, state, master, state["step"])

    def step_all(self, members: Sequence[Member], grads: Sequence[Tensor], skip: Tensor | None) -> None:
        """Dense for all parameters before the freeze, and for `non_freeze` groups after it; else compressed."""
        dense = [not self.schedule.frozen or bool(group.get("non_freeze")) for group, _ in members]
        chosen = [i for i, is_dense in enumerate(dense) if is_dense]
        self.update_densely([members[i] for i in chosen], [grads[i] for i in chosen], skip)
        chosen = [i for i, is_dense in enumerate(dense) if not is_dense]
        compressed = [members[i] for i in chosen]
        momenta = [next_momentum(members[i][0], self.state[members[i][1]], grads[i]) for i in chosen]
        results = self.reduce_compressed(compressed, momenta, skip)
        for (group, param), (mean, error) in zip(compressed, results, strict=True):
            self.apply_rule(param, partial(self._compressed_rule, group, error), self.masked(group, mean), skip)

    def _compressed_rule(
        self, group: dict[str, Any], error: Tensor | None, state: dict[str, Tensor], master: Tensor, momentum: Tensor
    ) -> Tensor:
        state["exp_avg"] = momentum
        if error is not None:
            state["worker_error"] = error
        return self._moved(group, state, master, self.schedule.frozen_at)

    def _moved(
        self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, variance_updates: float | Tensor
    ) -> Tensor:
        direction = corrected(group, state["exp_avg"], state["step"]) / denominator(
            group, state["exp_avg_sq"], variance_updates
        )
        if group["weight_decay"]:
            direction = direction + group["weight_decay"] * master
        return master + -as_scalar(group["lr"]) * direction
