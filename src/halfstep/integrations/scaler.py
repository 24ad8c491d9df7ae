"""The loss scaler of a policy, as a drop-in for the one that a library would make.

Libraries call torch's GradScaler, so the scale follows torch's rule here: `loss_scale=dynamic` has torch's defaults, and
settings of another rule are rejected.

A plugin sees one optimizer at a time and updates the scale after each step. With several optimizers that disturbs those that have not
stepped yet: torch's scaler forgets in `update` which gradients are unscaled, so that a second optimizer divided its clipped ones by the
scale again, and it unscales the others with the new scale instead of that of their backward pass. `SharedScaler` prevents both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from halfstep.errors import SettingError
from halfstep.precision.loss_scale import LossScale
from halfstep.precision.policy import Policy
from halfstep.scaling.gradscaler import GradScaler

__all__ = ["SharedScaler", "scaler_of"]


def scaler_of(policy: Policy, device: torch.device, params: Mapping[str, Tensor]) -> GradScaler | None:
    """A GradScaler with the policy's settings, or None where the policy has no loss scale; `params` provide names for its stop."""
    if policy.loss_scale == "none":
        return None
    names = list(params.items())
    if policy.loss_scale == "dynamic":
        return GradScaler(device.type, named_parameters=names)
    rule = LossScale.parse(policy.loss_scale)
    if rule.mode != "dynamic" or rule.semantics != "torch":
        raise SettingError(
            f"loss_scale={policy.loss_scale}: inside a library the loss scale follows torch's rule. Use loss_scale=dynamic, or "
            "loss_scale=dynamic(semantics=torch;...) with its settings."
        )
    return GradScaler(
        device.type,
        rule.init_scale,
        rule.growth_factor,
        rule.backoff_factor,
        rule.growth_interval,
        min_scale=rule.min_scale,
        max_skips=rule.max_skips,
        named_parameters=names,
    )


class SharedScaler:
    """One scaler for optimizers that step one after the other, each step with an update of the scale."""

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self._used: Tensor | None = None  # the scale of the last backward pass

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, multiplied by the scale."""
        scaled: Tensor = self.scaler.scale(loss)
        current = self.scaler._scale  # noqa: SLF001 - get_scale() waits
        self._used = None if current is None else current.clone()  # update() changes it in place
        return scaled

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradients of an optimizer are true ones already."""
        state = self.scaler._per_optimizer_states.get(id(optimizer))  # noqa: SLF001 - has no public name
        return state is not None and state["stage"] is OptState.UNSCALED

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients of an optimizer true ones, once."""
        if not self.is_unscaled(optimizer):
            self._with_used_scale(self.scaler.unscale_, optimizer)

    def step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Step unless a gradient is not finite, and update the scale; optimizers that are unscaled and wait stay so."""
        returned = self._with_used_scale(self.scaler.step, optimizer, **kwargs)
        states = self.scaler._per_optimizer_states  # noqa: SLF001
        waiting = {key: state for key, state in states.items() if state["stage"] is OptState.UNSCALED}
        for key in waiting:
            del states[key]
        self.scaler.update()
        self.scaler._per_optimizer_states.update(waiting)  # noqa: SLF001 - update() has made another dictionary
        return returned

    def _with_used_scale(self, call: Any, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        current = self.scaler._scale  # noqa: SLF001
        if current is None or self._used is None:
            return call(optimizer, **kwargs)
        self.scaler._scale = self._used  # noqa: SLF001
        try:
            return call(optimizer, **kwargs)
        finally:
            self.scaler._scale = current  # noqa: SLF001
