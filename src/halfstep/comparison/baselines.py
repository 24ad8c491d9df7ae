"""Baselines (`--peer`): the same job in other libraries' loops, written as their documentation recommends.

    torch-amp    autocast and GradScaler by hand: unscale, clip, step, update
    accelerate   `Accelerator(mixed_precision=...)`, `prepare`, `accelerator.backward`, `clip_grad_norm_`
    fabric       Lightning's `Fabric(precision=...)`, `setup`, `fabric.backward`, `clip_gradients`

All of them use fp32 weights, which serve as masters. A stock Adam, AdamW or SGD is switched to `fused=True` where
Halfstep would switch it, because that is what a user who cares about speed writes; the truth table shows it. The
scheduler is stepped after every step, as is usual in these loops.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.comparison.measurements import SkipCause
from halfstep.comparison.training_loop import Parts, StepOutcome, TrainingLoop
from halfstep.comparison.variant import Variant
from halfstep.engine.compiling import compile_model
from halfstep.engine.steps import choose_path
from halfstep.engine.truth import census
from halfstep.errors import MissingError, SettingError
from halfstep.hardware.onednn import ignore_fallback_warnings
from halfstep.hardware.tf32 import set_tf32
from halfstep.precision.formats import torch_dtype

__all__ = ["make_baseline"]


def make_baseline(variant: Variant, parts: Parts, max_norm: float | None, *, wraps: bool = False) -> TrainingLoop:
    """The loop of a baseline; raises `MissingError` with the install command if its library is missing.

    With `wraps`, torch's own loop trains on the ranks of the process group, in DistributedDataParallel; the others do not.
    """
    if len(getattr(parts.optimizer, "param_groups", ())) == 0:
        raise SettingError("--peer needs a job with one optimizer; the optimizer of this job has no parameter groups.")
    ignore_fallback_warnings()
    set_tf32(False)  # torch's default for matmuls; cuDNN's default is on
    if variant.baseline == "accelerate":
        return _Accelerate(variant, parts, max_norm)
    if variant.baseline == "fabric":
        return _Fabric(variant, parts, max_norm)
    return _TorchAmp(variant, parts, max_norm, wraps=wraps)


class _PlainLoop:
    """The parts that the three loops share."""

    def __init__(self, variant: Variant, parts: Parts, max_norm: float | None) -> None:
        self.variant, self.max_norm = variant, max_norm
        self.model: nn.Module = parts.model
        self.optimizer, self.scheduler = parts.optimizer, parts.scheduler
        self.params = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.device = self.params[0].device
        self.dtype = torch_dtype(variant.policy)
        self.path = choose_path(self.optimizer, parts.model).reason.partition(":")[0]
        compile_model(self.model, variant.compile)
        self._num_updates = 0
        self._grads: dict[str, int] = {}
        self._grad_bytes = 0

    @contextlib.contextmanager
    def evaluate(self) -> Iterator[None]:
        """Eval mode, no gradients, the loop's precision."""
        self.model.eval()
        try:
            with torch.no_grad(), self.forward():
                yield
        finally:
            self.model.train()

    def forward(self) -> AbstractContextManager[Any]:
        """An autocast region."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.variant.policy != "fp32")

    def state_tensors(self) -> list[Tensor]:
        """The moments."""
        return [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]

    def end_schedule(self) -> None:
        """Remove the scheduler."""
        self.scheduler = None

    def look_at_gradients(
        self, named: list[tuple[str, Tensor]], look: Callable[[list[tuple[str, Tensor]], float], None]
    ) -> None:
        """Look now: the backward pass has reduced them."""
        look([(name, param.grad) for name, param in named if param.grad is not None], self.divisor())

    def divisor(self) -> float:
        """The loss scale."""
        raise NotImplementedError

    def examine_skips(self, *, on: bool) -> None:
        """Nothing to switch: only the Engine can compute a step again."""

    def skip_causes(self) -> tuple[SkipCause, ...]:
        """None is known."""
        return ()

    def examining_seconds(self) -> float:
        """No time."""
        return 0.0

    def close(self) -> None:
        """Nothing to undo: no setup outlives the process."""

    def _advance(self) -> None:
        self._num_updates += 1
        if hasattr(self.scheduler, "step_update"):  # timm's schedulers count updates this way
            self.scheduler.step_update(num_updates=self._num_updates)
        elif self.scheduler is not None:
            self.scheduler.step()

    def _record_gradients(self) -> None:
        if not self._grads:
            grads = [p.grad for p in self.params if p.grad is not None]
            self._grads, self._grad_bytes = census(grads), sum(g.numel() * g.element_size() for g in grads)

    def truth(self) -> dict[str, Any]:
        """The same rows as the engine's, read from the tensors."""
        moments = [t for t in self.state_tensors() if t.numel() > 1]
        count = sum(p.numel() for p in self.params)
        num_bytes = sum(t.numel() * t.element_size() for t in [*self.params, *moments]) + self._grad_bytes
        compute = "IEEE fp32" if self.variant.policy == "fp32" else f"{self.variant.policy} autocast"
        scaled = "torch's GradScaler" if self.variant.policy == "fp16" else "none"
        rows = {
            "precision": self.variant.label,
            "parameters": f"{_listed(census(self.params))}; {count:,} trainable",
            "gradients": _listed(self._grads),
            "master": "the fp32 weights themselves",
            "optimizer states": _listed(census(moments)),
            "compute": f"{compute} on {self.device.type}",
            "losses, softmax, sums": "chosen by torch.autocast",
            "loss scale": scaled,
            "step": self.path,
            "bytes per parameter": f"{num_bytes / count:.2f}",
        }
        return {"rows": rows, "lossy": [], "waived_guarantees": [], "bytes_per_parameter": round(num_bytes / count, 4)}


class _TorchAmp(_PlainLoop):
    """Autocast and GradScaler by hand."""

    def __init__(self, variant: Variant, parts: Parts, max_norm: float | None, *, wraps: bool = False) -> None:
        super().__init__(variant, parts, max_norm)
        if wraps:
            places = None if self.device.type == "cpu" else [self.device]
            self.model = nn.parallel.DistributedDataParallel(parts.model, device_ids=places)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=variant.policy == "fp16")

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Backpropagate the scaled loss."""
        self.scaler.scale(loss if weight is None else loss * weight).backward()  # type: ignore[no-untyped-call]

    def divisor(self) -> float:
        """The scaler's scale."""
        return float(self.scaler.get_scale())

    def step(self, replay: Callable[[], Any] | None = None) -> Callable[[], StepOutcome]:
        """Unscale, clip, step, update."""
        self._record_gradients()
        before = _scale_of(self.scaler)
        norm = None
        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.params, self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self._advance()
        return _outcome(norm, before, _scale_of(self.scaler))


class _Accelerate(_PlainLoop):
    """Accelerate's documented loop."""

    def __init__(self, variant: Variant, parts: Parts, max_norm: float | None) -> None:
        module = _load("accelerate", "accelerate")
        super().__init__(variant, parts, max_norm)
        mixed = "no" if variant.policy == "fp32" else variant.policy
        self.accelerator = module.Accelerator(mixed_precision=mixed, cpu=self.device.type == "cpu")
        self.model, self.optimizer = self.accelerator.prepare(parts.model, parts.optimizer)
        self.params = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def forward(self) -> AbstractContextManager[Any]:
        """The library's autocast, which also covers the loss."""
        block: AbstractContextManager[Any] = self.accelerator.autocast()
        return block

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Call the library's backward."""
        self.accelerator.backward(loss)

    def divisor(self) -> float:
        """The scale of the library's scaler."""
        scaler = self.accelerator.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def step(self, replay: Callable[[], Any] | None = None) -> Callable[[], StepOutcome]:
        """Clip and step."""
        self._record_gradients()
        before = _scale_of(self.accelerator.scaler)
        norm = None
        if self.max_norm is not None:
            norm = self.accelerator.clip_grad_norm_(self.params, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._advance()
        return _outcome(norm, before, _scale_of(self.accelerator.scaler))


class _Fabric(_PlainLoop):
    """Fabric's documented loop."""

    def __init__(self, variant: Variant, parts: Parts, max_norm: float | None) -> None:
        fabric = _load("lightning.fabric", "lightning")
        super().__init__(variant, parts, max_norm)
        precision = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}[variant.policy]
        self.fabric = fabric.Fabric(accelerator=self.device.type, devices=1, precision=precision)
        chosen = getattr(self.fabric._precision, "precision", precision)  # noqa: SLF001 - unsupported precisions are replaced here
        if chosen != precision:
            raise SettingError(
                f"Fabric replaces precision={precision!r} by {chosen!r} on this device; compare it in that precision."
            )
        self.model, self.optimizer = self.fabric.setup(parts.model, parts.optimizer)

    def forward(self) -> AbstractContextManager[Any]:
        """The library's autocast, which also covers the loss."""
        block: AbstractContextManager[Any] = self.fabric.autocast()
        return block

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Call the library's backward."""
        self.fabric.backward(loss)

    def divisor(self) -> float:
        """The scale of the library's scaler."""
        scaler = self._scaler()
        return 1.0 if scaler is None else float(scaler.get_scale())

    def step(self, replay: Callable[[], Any] | None = None) -> Callable[[], StepOutcome]:
        """Clip and step."""
        self._record_gradients()
        before = _scale_of(self._scaler())
        norm = None
        if self.max_norm is not None:
            norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._advance()
        return _outcome(norm, before, _scale_of(self._scaler()))

    def _scaler(self) -> Any:
        return getattr(self.fabric._precision, "scaler", None)  # noqa: SLF001 - the scaler has no public accessor


def _load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingError(
            f"This --peer needs {package}, which cannot be imported ({error}). Install it with: pip install {package}"
        ) from error


def _scale_of(scaler: Any) -> Tensor | None:
    """A copy of the scale on its device; `get_scale()` would synchronize."""
    scale = getattr(scaler, "_scale", None)
    return scale.clone() if isinstance(scale, Tensor) else None


def _outcome(norm: Any, before: Tensor | None, after: Tensor | None) -> Callable[[], StepOutcome]:
    def read() -> StepOutcome:
        grad_norm = None if norm is None else float(norm)
        if before is None or after is None:  # no scaler
            return StepOutcome(grad_norm, None, skipped=False)
        return StepOutcome(grad_norm, float(before), skipped=float(after) < float(before))

    return read


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(counts) or "none yet"
