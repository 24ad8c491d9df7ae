"""The same job in other people's loops, written as their own documentation has it, so that anyone can check our figures.

    torch-amp    autocast and GradScaler by hand: unscale, clip, step, update
    accelerate   `Accelerator(mixed_precision=...)`, `prepare`, `accelerator.backward`, `clip_grad_norm_`
    fabric       Lightning's `Fabric(precision=...)`, `setup`, `fabric.backward`, `clip_gradients`

All hold fp32 weights, which are their own master. A stock Adam, AdamW or SGD is switched to `fused=True` where Halfstep
would switch it, because that is what a person who cares for speed writes; the truth table says so. The scheduler is
stepped after every step, as these loops usually are.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.comparison.contender import Contender
from halfstep.comparison.loops import Outcome, Parts
from halfstep.engine.compiling import compile_model
from halfstep.engine.steps import choose_path
from halfstep.engine.truth import census
from halfstep.errors import MissingError, SettingError
from halfstep.hardware.onednn import ignore_fallback_warnings
from halfstep.hardware.tf32 import set_tf32
from halfstep.precision.formats import torch_dtype

__all__ = ["make_peer"]


def make_peer(contender: Contender, parts: Parts, max_norm: float | None) -> Any:
    """The loop of a peer; a peer that is not installed is a `MissingError` that says how to get it."""
    if len(getattr(parts.optimizer, "param_groups", ())) == 0:
        raise SettingError("The peers' loops take one optimizer; this job's has no parameter groups.")
    ignore_fallback_warnings()
    set_tf32(False)  # torch's default for matmuls; cuDNN's would otherwise be on
    loops = {"torch-amp": _TorchAmp, "accelerate": _Accelerate, "fabric": _Fabric}
    return loops[contender.peer or ""](contender, parts, max_norm)


class _Stock:
    """What the three loops share."""

    def __init__(self, contender: Contender, parts: Parts, max_norm: float | None) -> None:
        self.contender, self.max_norm = contender, max_norm
        self.model: nn.Module = parts.model
        self.optimizer, self.scheduler = parts.optimizer, parts.scheduler
        self.params = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.device = self.params[0].device
        self.dtype = torch_dtype(contender.policy)
        self.path = choose_path(self.optimizer, parts.model).reason.partition(":")[0]
        compile_model(self.model, contender.compile)
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
        """Autocast."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.contender.policy != "fp32")

    def state_tensors(self) -> list[Tensor]:
        """Moments."""
        return [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]

    def end_schedule(self) -> None:
        """Without a scheduler from here on."""
        self.scheduler = None

    def close(self) -> None:
        """Nothing was set up that outlives the process."""

    def _advance(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def _note_gradients(self) -> None:
        if not self._grads:
            grads = [p.grad for p in self.params if p.grad is not None]
            self._grads, self._grad_bytes = census(grads), sum(g.numel() * g.element_size() for g in grads)

    def truth(self) -> dict[str, Any]:
        """The same rows as the engine's, read from the tensors."""
        moments = [t for t in self.state_tensors() if t.numel() > 1]
        count = sum(p.numel() for p in self.params)
        held = sum(t.numel() * t.element_size() for t in [*self.params, *moments]) + self._grad_bytes
        compute = "IEEE fp32" if self.contender.policy == "fp32" else f"{self.contender.policy} autocast"
        scaled = "torch's GradScaler" if self.contender.policy == "fp16" else "none"
        rows = {
            "precision": self.contender.label,
            "parameters": f"{_listed(census(self.params))}; {count:,} trainable",
            "gradients": _listed(self._grads),
            "master": "the fp32 weights themselves",
            "optimizer states": _listed(census(moments)),
            "compute": f"{compute} on {self.device.type}",
            "losses, softmax, sums": "as torch's autocast has it",
            "loss scale": scaled,
            "step": self.path,
            "bytes per parameter": f"{held / count:.2f} held",
        }
        return {"rows": rows, "lossy": [], "gives_up": [], "bytes_per_parameter": round(held / count, 4)}


class _TorchAmp(_Stock):
    """Autocast and GradScaler by hand."""

    def __init__(self, contender: Contender, parts: Parts, max_norm: float | None) -> None:
        super().__init__(contender, parts, max_norm)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=contender.policy == "fp16")

    def backward(self, loss: Tensor) -> None:
        """Scaled."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def divisor(self) -> float:
        """The scaler's scale."""
        return float(self.scaler.get_scale())

    def step(self) -> Callable[[], Outcome]:
        """Unscale, clip, step, update."""
        self._note_gradients()
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


class _Accelerate(_Stock):
    """Accelerate's documented loop."""

    def __init__(self, contender: Contender, parts: Parts, max_norm: float | None) -> None:
        module = _load("accelerate", "accelerate")
        super().__init__(contender, parts, max_norm)
        mixed = "no" if contender.policy == "fp32" else contender.policy
        self.accelerator = module.Accelerator(mixed_precision=mixed, cpu=self.device.type == "cpu")
        self.model, self.optimizer = self.accelerator.prepare(parts.model, parts.optimizer)
        self.params = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def forward(self) -> AbstractContextManager[Any]:
        """Its own autocast, which also covers the loss."""
        block: AbstractContextManager[Any] = self.accelerator.autocast()
        return block

    def backward(self, loss: Tensor) -> None:
        """Its own."""
        self.accelerator.backward(loss)

    def divisor(self) -> float:
        """Its scaler's scale."""
        scaler = self.accelerator.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def step(self) -> Callable[[], Outcome]:
        """Clip, step."""
        self._note_gradients()
        before = _scale_of(self.accelerator.scaler)
        norm = None
        if self.max_norm is not None:
            norm = self.accelerator.clip_grad_norm_(self.params, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._advance()
        return _outcome(norm, before, _scale_of(self.accelerator.scaler))


class _Fabric(_Stock):
    """Fabric's documented loop."""

    def __init__(self, contender: Contender, parts: Parts, max_norm: float | None) -> None:
        fabric = _load("lightning.fabric", "lightning")
        super().__init__(contender, parts, max_norm)
        precision = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}[contender.policy]
        self.fabric = fabric.Fabric(accelerator=self.device.type, devices=1, precision=precision)
        chosen = getattr(self.fabric._precision, "precision", precision)  # noqa: SLF001 - it replaces what it cannot do
        if chosen != precision:
            raise SettingError(
                f"Fabric runs {chosen} on this device where {precision} was asked for; compare it as that."
            )
        self.model, self.optimizer = self.fabric.setup(parts.model, parts.optimizer)

    def forward(self) -> AbstractContextManager[Any]:
        """Its own autocast, which also covers the loss."""
        block: AbstractContextManager[Any] = self.fabric.autocast()
        return block

    def backward(self, loss: Tensor) -> None:
        """Its own."""
        self.fabric.backward(loss)

    def divisor(self) -> float:
        """Its scaler's scale."""
        scaler = self._scaler()
        return 1.0 if scaler is None else float(scaler.get_scale())

    def step(self) -> Callable[[], Outcome]:
        """Clip, step."""
        self._note_gradients()
        before = _scale_of(self._scaler())
        norm = None
        if self.max_norm is not None:
            norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._advance()
        return _outcome(norm, before, _scale_of(self._scaler()))

    def _scaler(self) -> Any:
        return getattr(self.fabric._precision, "scaler", None)  # noqa: SLF001 - it has no public way to the scale


def _load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingError(
            f"The peer needs {package}, which cannot be imported ({error}). Install it with: pip install {package}"
        ) from error


def _scale_of(scaler: Any) -> Tensor | None:
    """A copy of the scale where it lives; `get_scale()` would wait for the device."""
    scale = getattr(scaler, "_scale", None)
    return scale.clone() if isinstance(scale, Tensor) else None


def _outcome(norm: Any, before: Tensor | None, after: Tensor | None) -> Callable[[], Outcome]:
    def read() -> Outcome:
        taken = None if norm is None else float(norm)
        if before is None or after is None:  # no scaler
            return Outcome(taken, None, skipped=False)
        return Outcome(taken, float(before), skipped=float(after) < float(before))

    return read


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(counts) or "none yet"
