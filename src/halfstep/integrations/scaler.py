"""The loss scaler of a policy, as a drop-in for the one that a library would make.

Libraries call torch's GradScaler, so the scale follows torch's rule here: `loss_scale=dynamic` has torch's defaults, and
settings of another rule are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.precision.loss_scale import LossScale
from halfstep.precision.policy import Policy
from halfstep.scaling.gradscaler import GradScaler

__all__ = ["scaler_of"]


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
