"""The update at the end of a window: gradients read once, then every optimizer steps or none does.

What follows from the one decision stays on the device: optimizers, loss scale, buffers and EMA are all gated by the same
flag, so a skipped step changes nothing and nothing waits to learn whether it was skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep.backends.base import Backend
from halfstep.engine.buffers import BufferGuard
from halfstep.engine.ema import Ema
from halfstep.engine.release import GradientRelease
from halfstep.engine.setup import PreparedRun
from halfstep.engine.steps import Decision, decide, gradients_of, take_step, unscale_in_place, widen
from halfstep.engine.watch import hook_of
from halfstep.engine.window import Window
from halfstep.errors import SettingError
from halfstep.kernels.gradstats import dense_values
from halfstep.optim.shards import local
from halfstep.scaling.scaler import Scaler

__all__ = ["Update"]


@dataclass(frozen=True)
class Update:
    """Everything that one decision about a window's gradients gates."""

    run: PreparedRun
    backend: Backend
    scaler: Scaler
    buffers: BufferGuard
    ema: Ema | None
    release: GradientRelease | None
    max_norm: float | None
    watch: Any
    _tables: dict[Any, Any] = field(default_factory=dict, repr=False)  # of the kernel that computes the norm

    def weigh(self, window: Window, weight: Any) -> float | Tensor:
        """Add a micro-batch to the window; returns the factor of its losses, which the next backward must use."""
        self._multiply(window, window.weigh(weight))
        reference = self.backend.agree_reference(window.reference, weighted=window.has_weights, closing=False)
        if reference is not window.reference:
            self._multiply(window, window.adopt(reference))
        return window.factor

    def gradients(self, window: Window) -> dict[str, Tensor]:
        """The gradients by name, reduced over ranks, duplicate rows of sparse ones summed."""
        reference = self.backend.agree_reference(window.reference, weighted=window.has_weights, closing=True)
        if reference is not window.reference:
            self._multiply(window, window.adopt(reference))
        self.backend.reduce_gradients()
        own = self.backend.gradients()
        return gradients_of(self.run.params) if own is None else own

    def unscale(self, window: Window) -> None:
        """Divide the gradients in place, and remember in the window whether all were finite."""
        if self.backend.owns_optimizers:
            raise SettingError(
                f"unscale() with backend={self.backend.name!r}: each rank has a part of the gradients, and none are in param.grad. Clip with "
                "Engine(max_norm=...); watch= shows the gradients of each step."
            )
        self.gradients(window)
        widen(self.run.params.values())
        gradients = gradients_of(self.run.params)
        norm, grads = self._norm_over_ranks(window, gradients), list(gradients.values())
        divisor, _ = self._divisor(window)
        window.found_inf = decide(grads, divisor, None, self.backend, norm=norm).found_inf
        unscale_in_place(grads, torch.where(divisor == 0, 1.0, divisor))  # of a window whose weights are all 0

    def apply(self, window: Window, gradients: Mapping[str, Tensor]) -> Decision:
        """Decide, then step, update the loss scale and the EMA, and restore buffers after a skip."""
        decision = self._decide_and_step(window, gradients)
        if isinstance(window.is_empty, Tensor):
            self.scaler.advance(decision.found_inf, unless=window.is_empty)
        elif not window.is_empty:
            self.scaler.advance(decision.found_inf)
        self.buffers.restore_if(decision.found_inf)
        if self.backend.context().world_size > 1:
            self.backend.share_buffers(self.buffers.tensors())
        if self.ema is not None:
            self.ema.update(decision.found_inf)
        return decision

    def _decide_and_step(self, window: Window, gradients: Mapping[str, Tensor]) -> Decision:
        device, unscaled, grads = self.run.device, window.found_inf, list(gradients.values())
        norm = self._norm_over_ranks(window, gradients) if self.release is None else None
        # After unscale() nothing is left to divide by.
        divisor, is_one = self._divisor(window) if unscaled is None else (torch.ones((), device=device), True)
        hook_of(self.watch, "before_step")(gradients, divisor)
        if self.release is not None:
            return self.release.finish(device)
        decision = decide(grads, divisor, self.max_norm, self.backend, self._tables, norm=norm)
        hook_of(self.watch, "decided")(gradients, decision)
        if unscaled is not None:
            decision.found_inf.copy_(torch.maximum(decision.found_inf, unscaled))
        take_step(self.run.paths, decision, self.backend, divides=self.max_norm is not None or not is_one)
        return decision

    def _norm_over_ranks(self, window: Window, gradients: Mapping[str, Tensor]) -> Tensor | None:
        """The norm of the gradients as they are, before the weight is reduced: ranks can then agree on both at once."""
        if self.backend.context().world_size == 1:
            return None
        return self.backend.norm_of(gradients, window.weight, self._tables)

    def _divisor(self, window: Window) -> tuple[Tensor, bool]:
        """What the gradients were multiplied with, and whether that is known to be 1 without reading the device."""
        scale, weight = self.scaler.scale_on(self.run.device), self.backend.reduce_weight(window.weight)
        window.is_empty = weight == 0.0
        if isinstance(weight, float) and weight == 1.0:
            return scale, self.scaler.settings.mode == "none"
        return scale * weight, False

    @torch.no_grad()
    def _multiply(self, window: Window, correction: float | Tensor) -> None:
        """Multiply the gradients accumulated so far: the reference of their window has changed."""
        if not window.has_gradients or (isinstance(correction, float) and correction == 1.0):
            return
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        own = [local(p.grad) for p in self.run.params.values() if p.grad is not None]
        for grad in (*own, *self.backend.retained_gradients()):
            values = dense_values(grad)
            groups.setdefault((values.device, values.dtype), []).append(values)
        for (device, dtype), group in groups.items():
            on_device = isinstance(correction, Tensor)
            torch._foreach_mul_(group, correction.to(device, dtype) if on_device else correction)  # type: ignore[union-attr]
