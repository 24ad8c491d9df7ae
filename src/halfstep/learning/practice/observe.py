"""What a training script does, seen from inside: backward passes, loss scales, gradients, updates, layers.

How it works. Nothing is concluded from how the script is written. The output of `scaler.scale` gets a hook: if it fires, a backward
pass went through it, and its gradients carry the scale. After each backward pass the gradients are copied and divided by that scale:
the true gradient. At the optimizer's step the gradient that it gets, or for plain SGD the change of the weights divided by lr, is
compared with the true one. So a gradient that is still scaled, was never scaled, or is clipped at the wrong size shows in its norm, whoever
divided or clipped it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from halfstep.learning.practice.memory import FORMATS, Operators
from halfstep.learning.practice.record import Backward, Clip, RunSpec, Step
from halfstep.scaling.scaler import Scaler as EngineScaler

__all__ = ["Observer"]


class Observer:
    """Patches torch in this process and records what the script does with it."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.operators = Operators()
        self.backwards: list[Backward] = []
        self.steps: list[Step] = []
        self.num_updates = 0
        self._pending: set[int] = set()  # optimizers stepped by a scaler since its last update
        self._scale = 0.0  # of the backward pass that runs; 0: it did not go through scaler.scale
        self._depth = 0
        self._optimizers: list[torch.optim.Optimizer] = []
        self._true: dict[int, Tensor] = {}  # id of a parameter -> its true gradient
        self._clip: Clip | None = None
        self._before: list[Tensor] = []
        self._received: list[Tensor] = []
        self._stepped = False
        self._in_scaler = False
        self._last_step = time.perf_counter()

    @property
    def pending_updates(self) -> int:
        """How many optimizers a scaler has stepped without an update since."""
        return len(self._pending)

    def patch(self) -> None:
        """Observe torch from here on."""
        self._patch_backward()
        self._patch_scaler()
        self._patch_clipping()
        owner: Any = torch.optim.Optimizer
        created = owner.__init__

        def create(optimizer: Any, *args: Any, **options: Any) -> None:
            created(optimizer, *args, **options)
            self._optimizers.append(optimizer)

        owner.__init__ = create
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    # Backward passes.

    def _patch_backward(self) -> None:
        def observed(original: Callable[..., Any]) -> Callable[..., Any]:
            def backward(*args: Any, **options: Any) -> Any:
                if self._depth:
                    return original(*args, **options)
                self._depth += 1
                self._scale = 0.0
                self.operators.products.clear()
                under_autocast = torch.is_autocast_enabled("cpu")
                fresh = not any(p.grad is not None and bool(p.grad.any()) for p in self._params())
                try:
                    result = original(*args, **options)
                finally:
                    self._depth -= 1
                self._after_backward(under_autocast=under_autocast, fresh=fresh)
                return result

            return backward

        Tensor.backward = observed(Tensor.backward)  # type: ignore[method-assign]
        torch.autograd.backward = observed(torch.autograd.backward)

    def _after_backward(self, *, under_autocast: bool, fresh: bool) -> None:
        with _disable_current_modes():  # what the observer computes is not the script's
            self._note_backward(set(self.operators.products), under_autocast=under_autocast, fresh=fresh)

    def _note_backward(self, products: set[str], *, under_autocast: bool, fresh: bool) -> None:
        number = len(self.backwards)
        compute = next((name for name in ("fp16", "bf16") if name in products), "fp32")
        params = [p for p in self._params() if p.grad is not None]
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            if self.spec.boost is not None:
                norm = _norm([p.grad for p in params]) / (self._scale or 1.0)
                if 0 < norm < self.spec.boost:
                    for p in params:
                        p.grad.mul_(self.spec.boost / norm)
            injected = number in self.spec.inject and bool(params)
            if injected:
                params[0].grad.view(-1)[0] = torch.inf
            self._true = {id(p): p.grad.float() / (self._scale or 1.0) for p in params}
            finite = all(bool(torch.isfinite(g).all()) for g in self._true.values())
        self.backwards.append(
            Backward(compute, self._scale > 0, self._scale or 1.0, under_autocast, injected, finite, fresh)
        )

    def _params(self) -> Iterator[Any]:
        seen_ids: set[int] = set()
        for optimizer in self._optimizers:
            for p in _params_of(optimizer):
                if id(p) not in seen_ids:
                    seen_ids.add(id(p))
                    yield p

    # Scaling.

    def _patch_scaler(self) -> None:
        torch_scaler: Any = torch.amp.GradScaler
        for owner in (torch_scaler, EngineScaler):
            self._patch_scale(owner)
        step, update = torch_scaler.step, torch_scaler.update

        def observed_step(scaler: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
            if self._in_scaler or not scaler.is_enabled():
                return step(scaler, optimizer, *args, **options)
            self._in_scaler, self._stepped = True, False
            try:
                result = step(scaler, optimizer, *args, **options)
            finally:
                self._in_scaler = False
            self._pending.add(id(optimizer))
            if not self._stepped:
                self._note(optimizer, applied=False, via_scaler=True)
            return result

        def observed_update(scaler: Any, *args: Any, **options: Any) -> None:
            update(scaler, *args, **options)
            if scaler.is_enabled():
                self.num_updates += 1
                self._pending.clear()
                if self.steps:
                    self.steps[-1] = replace(self.steps[-1], scale_after=scaler.get_scale())

        torch_scaler.step = observed_step
        torch_scaler.update = observed_update

    def _patch_scale(self, owner: Any) -> None:
        original = owner.scale

        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            if result is outputs:
                return result
            factor = float(scaler.get_scale())

            def passed(_: Tensor) -> None:
                self._scale = factor

            for tensor in [result] if isinstance(result, Tensor) else list(result):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(passed)  # type: ignore[no-untyped-call]
            return result

        owner.scale = scale

    def _patch_clipping(self) -> None:
        def observed(original: Callable[..., Any], kind: Any) -> Callable[..., Any]:
            def clip(parameters: Any, limit: float = 0.0, *args: Any, **options: Any) -> Any:
                limit = options.pop("max_norm", options.pop("clip_value", limit))
                self._clip = Clip(kind, float(limit))
                return original(parameters, limit, *args, **options)

            return clip

        modules: tuple[Any, ...] = (nn.utils, nn.utils.clip_grad)
        for module in modules:
            module.clip_grad_norm_ = observed(module.clip_grad_norm_, "norm")
            module.clip_grad_value_ = observed(module.clip_grad_value_, "value")

    # Steps.

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        divisor = getattr(optimizer, "grad_scale", None)
        divisor = 1.0 if divisor is None else float(divisor)
        with torch.no_grad(), _disable_current_modes():
            self._before = [p.detach().clone() for p in _params_of(optimizer)]
            self._received = [
                torch.zeros(()) if p.grad is None else p.grad.float() / divisor for p in _params_of(optimizer)
            ]

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._stepped = True
        skipped = getattr(optimizer, "found_inf", None)
        applied = skipped is None or float(skipped) == 0.0
        self._note(optimizer, applied=applied, via_scaler=self._in_scaler)

    def _note(self, optimizer: Any, *, applied: bool, via_scaler: bool) -> None:
        params = _params_of(optimizer)
        norms: dict[str, Any] = {}
        with torch.no_grad(), _disable_current_modes():
            finite = all(bool(torch.isfinite(p).all()) for p in params)
            if applied and self._true:
                norms = self._compare(optimizer, params)
        self.steps.append(
            Step(
                backward=len(self.backwards),
                via_scaler=via_scaler,
                applied=applied,
                weights=next((FORMATS[p.dtype] for p in params if p.dtype in (torch.float16, torch.bfloat16)), "fp32"),
                model=" ".join(sorted("x".join(map(str, p.shape)) or "1" for p in params)),
                seconds=time.perf_counter() - self._last_step,
                peak_bytes=self.operators.peak_bytes,
                clip=self._clip,
                finite_weights=finite,
                **norms,
            )
        )
        self._clip = None
        self._last_step = time.perf_counter()

    def _compare(self, optimizer: Any, params: list[Any]) -> dict[str, Any]:
        """Norms of the true gradient and of the one that was applied."""
        received, from_update = self._received, False
        groups = {
            (g.get("lr"), g.get("momentum"), g.get("weight_decay"), g.get("maximize")) for g in optimizer.param_groups
        }
        plain = type(optimizer).__name__ == "SGD" and len(groups) == 1
        lr, momentum, decay, maximize = next(iter(groups)) if plain else (0, 0, 0, False)
        # The change of small weights by a small lr is lost in rounding; lr = 1 is what the task asks for.
        if plain and lr == 1 and not momentum and not decay and not maximize:
            received = [b.float() - p.float() for b, p in zip(self._before, params, strict=True)]
            from_update = True
        pairs = [(self._true[id(p)], r) for p, r in zip(params, received, strict=True) if id(p) in self._true]
        if not pairs:
            return {}
        true, applied = [t for t, _ in pairs], [r for _, r in pairs]
        true_norm, norm = _norm(true), _norm(applied)
        inner = sum(float((t.double() * r.double()).sum()) for t, r in pairs)
        return {
            "true_norm": true_norm,
            "received_norm": norm,
            "true_max": max(float(t.abs().max()) for t in true),
            "received_max": max(float(r.abs().max()) for r in applied),
            "cosine": inner / (true_norm * norm) if true_norm * norm > 0 else 0.0,
            "from_update": from_update,
        }


def _params_of(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _norm(tensors: list[Any]) -> float:
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors))
