"""0/1 Adam (Lu et al., arXiv 2202.06009).

Before the variance is frozen, with T_v the steps whose number is a multiple of the variance interval:

    t in T_v       g = mean of the gradients, dense; m and v as in Adam
    else           g = compressed mean; m = beta1 m + (1 - beta1) g; v stays what it was
    both           p = p - lr (m / (sqrt(v) + eps) + weight_decay p)

The interval starts at 1 and doubles after every `var_update_scaler` variance steps. After step `var_freeze_step` + 1 the
variance stays what it is, and ranks train alone between synchronizations:

    each step      m_i = beta1 m_i + (1 - beta1) g_i
                   d = m_i / D + weight_decay p_i            D = sqrt(v) + eps, the same on all ranks
                   p_i = p_i - lr d;  u_i = u_i - lr d;  L = L + lr
    t in T_u       z = compressed mean of u_i D
                   m = -z / L;  p = p_0 + z / D;  u = 0;  L = 0

p_0 is the weight at the last synchronization. T_u are the multiples of the local interval, which doubles after every
`local_step_scaler` steps and stops at `local_step_clipper`. Both compression errors are zero at the freeze, because another
quantity is compressed from there on.

Two differences to DeepSpeed 0.19.6. It subtracts u_i from p_i instead of storing p_0, and so ranks drift apart by rounding; here
all have the same bits after a synchronization (4 more bytes per parameter while steps are local). And with one rank it leaves the
momentum as it is between variance steps; here the gradient is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.optim.onebit.averages import corrected, denominator, next_moments, next_momentum, reject_amsgrad
from halfstep.optim.onebit.base import Member, OneBitOptimizer
from halfstep.optim.onebit.schedule import ZeroOnePolicy, ZeroOneSchedule
from halfstep.optim.settings import as_scalar, check_betas, check_not_negative

__all__ = ["ZeroOneAdam"]


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam with DeepSpeed's arguments, and `master=` for 16-bit weights.

    Group setting: `exp_avg_mask` (zeros where the momentum is always zero).
    """

    title = "0/1 Adam"
    weights_differ: ClassVar[bool] = True  # between two synchronizations
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "worker_error", "momentum_accumulator", "anchor")
    scalars: ClassVar[tuple[str, ...]] = ("lrs",)
    unsigned: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq"})
    rank_states: ClassVar[tuple[str, ...]] = (*OneBitOptimizer.rank_states, "exp_avg", "momentum_accumulator")
    schedule: ZeroOneSchedule
    policy: ZeroOnePolicy

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,  # DeepSpeed's default, not 2^15
        local_step_clipper: int = 16,
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
        self.policy = ZeroOnePolicy(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)
        for name, value in vars(self.policy).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SettingError(f"{name}={value!r} must be a whole number, at least 1.")
        self.schedule = ZeroOneSchedule()
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
            master=master,
            states=states,
            process_group=process_group,
            local_gradients=local_gradients,
            compute=compute,
            allow_unverified=allow_unverified,
            deepspeed_compat=deepspeed_compat,
        )

    @property
    def synchronized(self) -> bool:
        """Whether the last step was a synchronization, or steps are not local yet."""
        self.settle()
        return not self.schedule.local_steps

    def advanced(self, norm: float | None) -> ZeroOneSchedule:
        """One more step."""
        return self.schedule.advance(self.policy)

    def on_freeze(self) -> None:
        """From here on the accumulated update is compressed, not the gradient."""
        super().on_freeze()
        self.zero_errors()

    def check_group(self, group: dict[str, Any]) -> None:
        """`non_freeze` is 1-bit Adam's."""
        super().check_group(group)
        if "non_freeze" in group:
            raise SettingError("non_freeze is a group setting of OneBitAdam; 0/1 Adam has one schedule for all groups.")

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The errors exist from the first compressed step on, and what local steps need from the freeze on."""
        if self.schedule.frozen:
            return self.moments
        return self.moments[: 3 if self.schedule.var_interval > 1 else 2]

    # --- the step -------------------------------------------------------------------------------------------------------

    def step_all(self, members: Sequence[Member], grads: Sequence[Tensor], skip: Tensor | None) -> None:
        """A variance step, a compressed step, a local step, or a local step with a synchronization."""
        if self.schedule.dense:
            self.update_densely(members, grads, skip)
        elif not self.schedule.frozen:
            for (group, param), (mean, error) in zip(
                members, self.reduce_compressed(members, grads, skip), strict=True
            ):
                self.apply_rule(param, partial(self._compressed_rule, group, error), self.masked(group, mean), skip)
        elif not self.schedule.synchronizes:
            for (group, param), grad in zip(members, grads, strict=True):
                self.apply_rule(param, partial(self._local_rule, group), grad, skip)
        else:
            sums = [self._weighted_sum(*member, grad) for member, grad in zip(members, grads, strict=True)]
            results = self.reduce_compressed(members, sums, skip)
            for (group, param), (mean, error) in zip(members, results, strict=True):
                self.apply_rule(param, partial(self._synchronized_rule, group, error), self.masked(group, mean), skip)

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """A variance step: Adam on the mean of the gradients."""
        state["exp_avg"], state["exp_avg_sq"] = next_moments(group, state, grad)
        return master + -as_scalar(group["lr"]) * self._direction(group, state, master, self.schedule.var_updates + 1)

    def _compressed_rule(
        self, group: dict[str, Any], error: Tensor | None, state: dict[str, Tensor], master: Tensor, grad: Tensor
    ) -> Tensor:
        state["exp_avg"] = next_momentum(group, state, grad)
        if error is not None:
            state["worker_error"] = error
        return master + -as_scalar(group["lr"]) * self._direction(group, state, master, self.schedule.var_updates)

    def _local_rule(
        self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor
    ) -> Tensor:  # fmt: skip
        if not self.schedule.local_steps:
            state["anchor"] = master
        state["exp_avg"] = next_momentum(group, state, grad)
        moved = -as_scalar(group["lr"]) * self._direction(group, state, master, self.schedule.var_updates)
        state["momentum_accumulator"] = state["momentum_accumulator"] + moved
        state["lrs"] = _sum_of_rates(state["lrs"], group)
        return master + moved

    def _weighted_sum(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        """What this rank accumulated up to this step, multiplied by the denominator: the value that is compressed."""
        state: dict[str, Tensor] = dict(self.state[param])
        state["step"] = state["step"] + 1
        self._local_rule(group, state, self.master_of(param), grad)
        return state["momentum_accumulator"] * self._denominator(group, state)

    def _synchronized_rule(
        self, group: dict[str, Any], error: Tensor | None, state: dict[str, Tensor], master: Tensor, mean: Tensor
    ) -> Tensor:
        start = state["anchor"] if self.schedule.local_steps else master
        rates = _sum_of_rates(state["lrs"], group)
        average = -mean / rates  # of the bias-corrected momentum, which the local steps used
        state["exp_avg"] = average / corrected(group, torch.ones_like(rates), state["step"])
        state["momentum_accumulator"] = torch.zeros_like(mean)
        state["lrs"] = torch.zeros_like(rates)
        if error is not None:
            state["worker_error"] = error
        new: Tensor = start + mean / self._denominator(group, state)
        return new

    def _direction(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, updates: int) -> Tensor:
        denominators = denominator(group, state["exp_avg_sq"], updates)
        direction = corrected(group, state["exp_avg"], state["step"]) / denominators
        return direction + group["weight_decay"] * master if group["weight_decay"] else direction

    def _denominator(self, group: dict[str, Any], state: dict[str, Tensor]) -> Tensor:
        return denominator(group, state["exp_avg_sq"], self.schedule.var_updates)


def _sum_of_rates(rates: Tensor, group: dict[str, Any]) -> Tensor:
    return (rates + as_scalar(group["lr"])).to(torch.float32)
