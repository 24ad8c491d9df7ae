"""Lightning Fabric: a precision plugin.

    fabric = Fabric(plugins=[HalfstepPrecision("fp16")])

As the plugin of the Trainer (`integrations/lightning.py`): our scaler, fp32 where 16 bits lose accuracy, lean presets, and
`fabric.clip_gradients` with fused optimizers, which Fabric's own plugin rejects in fp16. Fabric shows the optimizers to no
plugin before they step, so a stock one of a lean preset is adopted at its first step: what the loop calls on it reaches the one
that has the masters.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.plugins import Precision
from torch import Tensor, nn

from halfstep.engine.region import compute_region
from halfstep.errors import SettingError
from halfstep.hardware.accelerator import pick_device
from halfstep.integrations.adoption import Adoption
from halfstep.integrations.scaler import SharedScaler, scaler_of
from halfstep.integrations.versions import warn_if_untested
from halfstep.precision.policy import Policy

__all__ = ["HalfstepPrecision"]


class HalfstepPrecision(Precision):  # type: ignore[misc]
    """Trains in a Halfstep policy: a preset such as "fp16" or "bf16-lean", with `key=value` settings.

    `accumulate` is the number of micro-batches per step: above 1, lean presets add them up in fp32.
    """

    def __init__(self, policy: str | Policy = "bf16", *, accumulate: int = 1) -> None:
        warn_if_untested("lightning")
        self.policy = Policy.parse(policy) if isinstance(policy, str) else policy
        self.precision = str(self.policy)
        self._accumulate = accumulate
        self._device = pick_device("auto")
        self.scaler = scaler_of(self.policy, self._device, {})
        self._shared = None if self.scaler is None else SharedScaler(self.scaler)
        self._adoption = Adoption(self.policy)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Called by `fabric.setup`: cast the weights of lean presets, and wrap what computes in fp32."""
        self._adoption.convert(module, self._accumulate)
        return module

    def forward_context(self) -> AbstractContextManager[None]:
        """The block in which the model computes."""
        return compute_region(self._device.type, self.policy.compute, lean=self.policy.is_lean)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and backpropagate."""
        super().backward(tensor if self._shared is None else self._shared.scale(tensor), model, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, unless a gradient is not finite."""
        stepped = self._adoption.adopt(optimizer)
        return stepped.step(**kwargs) if self._shared is None else self._shared.step(stepped, **kwargs)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Called by `fabric.clip_gradients`: make the gradients true ones."""
        if self._shared is None:
            return
        if self.policy.params == "fp16":
            raise SettingError(
                f"{self.policy}: gradients in fp16 stay scaled until the step, which unscales them exactly, so Fabric cannot clip them. "
                "Use halfstep.integrations.clipping.clip_by_norm(params, max_norm, scale), the Trainer's plugin, or a preset with fp32 weights."
            )
        self._shared.unscale(self._adoption.adopt(optimizer))

    def state_dict(self) -> dict[str, Any]:
        """The state of the scaler."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with a saved loss scale."""
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)
