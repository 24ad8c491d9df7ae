"""Lightning's Trainer: a precision plugin and a callback.

    trainer = Trainer(plugins=[HalfstepPrecision("fp16")], callbacks=[HalfstepCallback()])

The plugin brings the presets: our loss scaler with its minimum, counts and hard stop; fp32 where 16 bits lose accuracy; lean
presets, with the optimizer of `configure_optimizers` adopted; and clipping by the true norm, with fused optimizers too, which
Lightning's own plugin rejects in fp16. The callback watches any run, with this plugin or Lightning's own. A plugin serves one fit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn

from halfstep.backends.base import unwrap
from halfstep.engine.region import compute_region
from halfstep.errors import SettingError
from halfstep.hardware.accelerator import pick_device
from halfstep.integrations.adoption import Adoption
from halfstep.integrations.clipping import clip_by_norm
from halfstep.integrations.monitor import Monitor, Outlet, own_optimizer
from halfstep.integrations.scaler import SharedScaler, scaler_of
from halfstep.integrations.versions import warn_if_untested
from halfstep.precision.policy import Policy
from halfstep.watching.watch import Watch

__all__ = ["HalfstepCallback", "HalfstepPrecision"]


class HalfstepPrecision(Precision):  # type: ignore[misc]
    """Trains in a Halfstep policy: a preset such as "fp16" or "bf16-lean", with `key=value` settings."""

    def __init__(self, policy: str | Policy = "bf16") -> None:
        warn_if_untested("lightning")
        self.policy = Policy.parse(policy) if isinstance(policy, str) else policy
        self.precision = str(self.policy)
        self.scaler: torch.amp.GradScaler | None = None
        self._shared: SharedScaler | None = None
        self._adoption = Adoption(self.policy)
        self._device = pick_device("auto")
        self._loaded: dict[str, Any] = {}

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Called by the Trainer before it wraps the model: cast the weights of lean presets."""
        trainer = getattr(module, "_trainer", None)
        self._adoption.convert(module, 1 if trainer is None else trainer.accumulate_grad_batches)
        return module

    def connect(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], list[Any]]:
        """Called by the Trainer: adopt the optimizers where the policy needs masters."""
        self._device = next(model.parameters()).device
        stepped = [self._adoption.adopt(optimizer) for optimizer in optimizers]
        if optimizers and self.scaler is None:
            scaler = scaler_of(self.policy, self._device, dict(unwrap(model).named_parameters()))
            if scaler is not None:
                self.scaler, self._shared = scaler, SharedScaler(scaler)
                if self._loaded:
                    scaler.load_state_dict(self._loaded)
        return model, stepped, lr_schedulers

    @contextlib.contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """The block in which steps of training, validation and tests compute."""
        with compute_region(self._device.type, self.policy.compute, lean=self.policy.is_lean):
            yield

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Scale the loss."""
        loss: Tensor = super().pre_backward(tensor if self._shared is None else self._shared.scale(tensor), module)
        return loss

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Compute the gradients, clip them, and step unless one is not finite."""
        if self._shared is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if isinstance(own_optimizer(optimizer), torch.optim.LBFGS):
            raise SettingError(
                "LBFGS computes several gradients inside one step(), which a loss scaler cannot unscale."
            )
        result = closure()
        if result is None and model.automatic_optimization:  # training_step returned None
            return result
        if not self._is_scaled:
            self._shared.unscale(optimizer)
        self._after_closure(model, optimizer)
        return self._shared.step(optimizer, **kwargs)

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the true gradients; in manual optimization this comes before the step that would unscale them."""
        if clip_val <= 0:
            return
        if self._shared is not None and not self._is_scaled:
            # The step knows the optimizer without Lightning's wrapper.
            self._shared.unscale(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
        scale = self.scaler._scale if self.scaler is not None and self._is_scaled else None  # noqa: SLF001 - get_scale() waits
        if gradient_clip_algorithm == GradClipAlgorithmType.NORM:
            clip_by_norm(self.main_params(optimizer), float(clip_val), scale)
        elif scale is None:
            self.clip_grad_by_value(optimizer, clip_val)
        else:
            raise SettingError(
                f"{self.policy}: gradients in fp16 stay scaled until the step, so they can be clipped by norm only."
            )

    def state_dict(self) -> dict[str, Any]:
        """The state of the scaler."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with a saved loss scale."""
        self._loaded = dict(state_dict)
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)

    def teardown(self) -> None:
        """Called by the Trainer at the end; trained weights stay as they are."""
        self._adoption.close()

    @property
    def _is_scaled(self) -> bool:
        """Whether gradients stay scaled until the step: fp16 ones would lose what the scale is for."""
        return self.policy.params == "fp16"


class HalfstepCallback(Callback):  # type: ignore[misc]
    """Watches a Trainer: numerics every `every` steps, skipped steps with their cause, NaN losses, a stop after `max_skips` in a row.

    `outlets` are called with each Event; `watch` has the samples and events of the run.
    """

    def __init__(
        self, *, every: int = 100, activations: bool = False, max_skips: int | None = 25, outlets: Sequence[Outlet] = ()
    ) -> None:
        warn_if_untested("lightning")
        settings: dict[str, Any] = {"every": every, "activations": activations, "max_skips": max_skips}
        self._attach: Callable[..., Monitor] = functools.partial(Monitor, outlets=outlets, **settings)
        self._monitor: Monitor | None = None
        self._step = 0

    @property
    def watch(self) -> Watch:
        """The Watch of the last fit."""
        if self._monitor is None:
            raise SettingError("HalfstepCallback has no Watch before training begins.")
        return self._monitor.watch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the optimizers and the scaler."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        start = trainer.global_step // len(trainer.optimizers)  # which counts the steps of all optimizers
        self._monitor = self._attach(pl_module, trainer.optimizers, scaler, start=start)
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record how this micro-batch is computed."""
        if self._monitor is not None and pl_module.automatic_optimization:
            compute = functools.partial(_training_step, trainer, pl_module, batch, batch_idx)
            self._monitor.record(compute, 1.0 / trainer.accumulate_grad_batches)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the loss, and end the step where this micro-batch has."""
        if self._monitor is None:
            return
        self._monitor.add_loss(outputs.get("loss") if isinstance(outputs, dict) else outputs)
        step = trainer.global_step
        if step != self._step:
            self._step = step
            self._monitor.end_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Deliver what is pending and detach."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Detach from a run that raised."""
        self._detach()

    def _detach(self) -> None:
        if self._monitor is not None:
            self._monitor.close()


def _training_step(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> Tensor:
    """The loss of a micro-batch, as the Trainer computes it; what the step logs is dropped."""
    log, module.log = module.log, _ignored
    log_dict, module.log_dict = module.log_dict, _ignored
    try:
        with trainer.precision_plugin.train_step_context():
            result = module.training_step(batch, batch_idx)
    finally:
        module.log, module.log_dict = log, log_dict
    loss: Tensor = result["loss"] if isinstance(result, dict) else result
    return loss


def _ignored(*_: Any, **__: Any) -> None:
    """In the place of a module's `log` during a replay."""
