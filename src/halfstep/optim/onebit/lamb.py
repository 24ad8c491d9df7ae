"""1-bit LAMB (Li et al., arXiv 2104.06069).

Dense steps are LAMB's, layer by layer, and record the average c0 of the layer's coefficient:

    m, v as in Adam from the mean of the gradients;  u = m / (sqrt(v) + eps) + weight_decay p
    c = |p| / |u|, clipped to [min_coeff, max_coeff]; 1 if a norm is 0
    c0 = coeff_beta c0 + (1 - coeff_beta) c, unless c = 1
    p = p - lr c u

Compressed steps send the momenta of all layers as one tensor, with one scale. A constant factor per layer, fixed at the first of
them, makes layers equally large before they share it: mean over layers of rms(m) / rms(m of the layer).

    m' = compressed mean of beta1 m + (1 - beta1) g_i
    g = (m' - beta1 m) / (1 - beta1);  w = beta2 w + (1 - beta2) g^2       a fresh variance, which starts as v
    a = m' / (sqrt(v) + eps);  u = a + weight_decay p                      v stays what it was
    f = max of (sqrt(v) + eps) / (sqrt(w) + eps); with weight decay f r + 1 - r, r = min(1, |a| / |u|)
    f clipped to [factor_min, factor_max], then to within factor_threshold of the last f
    p = p - lr c0 f u

c0 has no bias correction: 1 / (1 - coeff_beta) must be small against `freeze_step`. All coefficients are device tensors, so no step
waits for them. A layer whose momentum is zero has the factor 1 (DeepSpeed 0.19.6 divides by zero there), and padding has no values
(there it has some, which never end).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.events import log_warning
from halfstep.optim.onebit.averages import corrected, denominator, next_moments, next_momentum, reject_amsgrad
from halfstep.optim.onebit.base import Member
from halfstep.optim.onebit.freezing import FreezingOptimizer
from halfstep.optim.settings import as_scalar, check_betas, check_not_negative

__all__ = ["OneBitLamb"]


class OneBitLamb(FreezingOptimizer):
    """1-bit LAMB with DeepSpeed's arguments, `freeze_step="auto"`, and `master=` for 16-bit weights.

    Group setting: `exp_avg_mask` (zeros where the momentum is always zero).
    """

    title = "1-bit LAMB"
    one_scale: ClassVar[bool] = True
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "worker_error", "exp_avg_sq_fresh")
    scalars: ClassVar[tuple[str, ...]] = ("lamb_coeff_freeze", "last_factor", "scaling_coeff")
    unsigned: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq", "exp_avg_sq_fresh"})

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
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
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
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay, factor_threshold=factor_threshold)
        check_betas(betas)
        for low, high, name in ((min_coeff, max_coeff, "coeff"), (factor_min, factor_max, "factor")):
            if not 0 < low <= high:
                raise SettingError(f"The limits of the {name} must have 0 < min <= max, not {low!r} and {high!r}.")
        if not 0 <= coeff_beta < 1:
            raise SettingError(f"coeff_beta={coeff_beta!r} must lie in [0, 1).")
        if isinstance(freeze_step, int) and freeze_step * (1 - coeff_beta) < 0.999:
            log_warning(
                f"coeff_beta={coeff_beta} averages over {1 / (1 - coeff_beta):.0f} steps, and freeze_step={freeze_step} is before that: the frozen "
                "coefficient of 1-bit LAMB will still be near 0. Freeze later, or choose a smaller coeff_beta."
            )
        self.coeff_beta = coeff_beta
        self.factor_min, self.factor_max, self.factor_threshold = factor_min, factor_max, factor_threshold
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
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

    def initial_value(self, group: dict[str, Any], name: str) -> float:
        """Factors start at 1."""
        return 1.0 if name in {"last_factor", "scaling_coeff"} else 0.0

    def check_group(self, group: dict[str, Any]) -> None:
        """`non_freeze` is 1-bit Adam's."""
        super().check_group(group)
        if "non_freeze" in group:
            raise SettingError(
                "non_freeze is a group setting of OneBitAdam; 1-bit LAMB sends all layers as one tensor."
            )

    def coefficients(self) -> list[Tensor]:
        """The frozen coefficient times the last factor of each parameter, as device tensors: what scales its learning rate."""
        states = [self.state[p] for group in self.param_groups for p in group["params"] if self.state.get(p)]
        return [state["lamb_coeff_freeze"] * state["last_factor"] for state in states]

    # --- the step -------------------------------------------------------------------------------------------------------

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """One step of LAMB on the mean of the gradients."""
        state["exp_avg"], state["exp_avg_sq"] = next_moments(group, state, grad)
        adam = corrected(group, state["exp_avg"], state["step"]) / denominator(
            group, state["exp_avg_sq"], state["step"]
        )
        direction = _decayed(group, adam, master)
        weight_norm, norm = _norm(master), _norm(direction)
        ratio = (weight_norm / norm).clamp(group["min_coeff"], group["max_coeff"])
        one = torch.ones_like(ratio)
        coefficient = torch.where((weight_norm != 0) & (norm != 0), ratio, one)
        average = self.coeff_beta * state["lamb_coeff_freeze"] + (1 - self.coeff_beta) * coefficient
        state["lamb_coeff_freeze"] = torch.where(coefficient != 1, average, state["lamb_coeff_freeze"])
        return master + -as_scalar(group["lr"]) * coefficient * direction

    def step_all(self, members: Sequence[Member], grads: Sequence[Tensor], skip: Tensor | None) -> None:
        """LAMB before the freeze; after it all momenta in one compressed message."""
        if not self.schedule.frozen:
            self.update_densely(members, grads, skip)
            return
        factors = self._scaling_factors(members)
        momenta = [
            next_momentum(group, self.state[param], grad) * factor
            for (group, param), grad, factor in zip(members, grads, factors, strict=True)
        ]
        results = self.reduce_compressed(members, momenta, skip, fused=True)
        for (group, param), (mean, error), factor in zip(members, results, factors, strict=True):
            rule = partial(self._compressed_rule, group, error, factor)
            self.apply_rule(param, rule, self.masked(group, mean / factor), skip)

    def _scaling_factors(self, members: Sequence[Member]) -> list[Tensor]:
        states = [self.state[param] for _, param in members]
        if self._has_compressed():
            return [state["scaling_coeff"] for state in states]
        sizes = torch.stack([_norm(s["exp_avg"]) / math.sqrt(max(s["exp_avg"].numel(), 1)) for s in states])
        factors = torch.where(sizes > 0, sizes.mean() / sizes, torch.ones_like(sizes))
        return list(factors.unbind())

    def _has_compressed(self) -> bool:
        return self.schedule.step > self.schedule.frozen_at

    def _compressed_rule(
        self,
        group: dict[str, Any],
        error: Tensor | None,
        factor: Tensor,
        state: dict[str, Tensor],
        master: Tensor,
        momentum: Tensor,
    ) -> Tensor:
        beta1, beta2 = group["betas"]
        fresh = state["exp_avg_sq_fresh"] if self._has_compressed() else state["exp_avg_sq"]
        grad = (momentum - state["exp_avg"] * beta1) / (1 - beta1)
        fresh = (fresh * beta2).addcmul_(grad, grad, value=1 - beta2)
        frozen = denominator(group, state["exp_avg_sq"], self.schedule.frozen_at)
        adam = corrected(group, momentum, state["step"]) / frozen
        direction = _decayed(group, adam, master)
        change = self._change(group, state, frozen / denominator(group, fresh, state["step"]), adam, direction)
        state["exp_avg"], state["exp_avg_sq_fresh"] = momentum, fresh
        state["last_factor"], state["scaling_coeff"] = change, factor
        if error is not None:
            state["worker_error"] = error
        return master + -as_scalar(group["lr"]) * (state["lamb_coeff_freeze"] * change) * direction

    def _change(
        self, group: dict[str, Any], state: dict[str, Tensor], ratios: Tensor, adam: Tensor, direction: Tensor
    ) -> Tensor:
        """The factor on the frozen coefficient, from how much the variance would have changed."""
        last = state["last_factor"]
        if not ratios.numel():
            return last.clone()
        change = ratios.max()
        if group["weight_decay"]:
            share = (_norm(adam) / _norm(direction)).clamp(max=1.0)
            share = torch.where(share.isnan(), torch.ones_like(share), share)  # both norms are 0
            change = change * share + (1.0 - share)
        change = change.clamp(self.factor_min, self.factor_max)
        return torch.clamp(change, last * (1.0 - self.factor_threshold), last * (1.0 + self.factor_threshold))


def _decayed(group: dict[str, Any], direction: Tensor, master: Tensor) -> Tensor:
    return direction + group["weight_decay"] * master if group["weight_decay"] else direction


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm
