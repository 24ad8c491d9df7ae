"""A DeepSpeed engine that someone else built and drives: what it does, which faults apply, and whether its gradients are right.

    print(describe_engine(engine))                  rows of the truth table, and faults of this version
    with compare_gradients(engine) as comparison:   around one or more steps of any loop
        ...
    comparison.steps                                one `Reached` per optimizer step; None for a skipped one

Nothing of the engine is changed: hooks and wrapped methods are removed when the block ends. Every rank calls the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep.backends.deepspeed.known import engine_faults
from halfstep.backends.deepspeed.partition import Partition, partition_of
from halfstep.backends.deepspeed.rows import bare_rows
from halfstep.backends.deepspeed.selftest import GradientSums, Reached, compare
from halfstep.precision.deepspeed_faults import Fault

__all__ = ["EngineReport", "GradientComparison", "compare_gradients", "describe_engine"]


@dataclass(frozen=True)
class EngineReport:
    """What a DeepSpeed engine stores and computes in, and its known faults."""

    rows: Mapping[str, str]
    faults: tuple[Fault, ...]  # of this release with this configuration, some only after an overflow or a resume

    def __str__(self) -> str:
        width = max(map(len, self.rows))
        lines = [f"  {name:{width}}  {value}" for name, value in self.rows.items()]
        return "\n".join(
            [*lines, *(f"  {fault.id:{width}}  {fault.when}: {fault.consequence}" for fault in self.faults)]
        )


def describe_engine(engine: Any) -> EngineReport:
    """The rows and faults of an engine, read from its objects; changes nothing."""
    params = _trained(engine)
    return EngineReport(bare_rows(engine, params, partition_of(engine, params)), engine_faults(engine))


@dataclass
class GradientComparison:
    """The outcome of `compare_gradients`."""

    steps: list[Reached | None] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether every step that was applied used the true gradient."""
        return all(step is None or step.is_right for step in self.steps)


@contextlib.contextmanager
def compare_gradients(engine: Any) -> Iterator[GradientComparison]:
    """Compare the gradients that reach the optimizer with the true ones, for the steps inside this block.

    The true gradient is that of the loss that `engine.backward` is given: the mean over micro-batches and ranks, clipped
    to the engine's norm. It is added up in fp32, whole on every rank, so this needs 4 bytes per parameter.
    """
    params = _trained(engine)
    observer = _Observer(engine, params, partition_of(engine, params))
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    hook = inner.register_step_pre_hook(observer.capture)
    engine.backward, engine.step = observer.backward, observer.step
    try:
        yield observer.comparison
    finally:
        del engine.backward, engine.step
        hook.remove()
        observer.sums.close()


class _Observer:
    """Stands between a loop and its engine."""

    def __init__(self, engine: Any, params: Mapping[str, Tensor], partition: Partition | None) -> None:
        self.sums, self.comparison = GradientSums(params), GradientComparison()
        self._engine, self._params, self._partition = engine, params, partition
        self._inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self._backward, self._step = engine.backward, engine.step
        self._captured: dict[str, tuple[int, Tensor]] = {}  # where it starts in its parameter, and the gradient

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The engine's backward; what it multiplies the loss with is seen in the gradient of the loss."""
        averages = kwargs.get("scale_wrt_gas", True)
        share = 1.0 / self._engine.gradient_accumulation_steps() if averages else 1.0

        def note(grad: Tensor) -> None:
            self.sums.factor = grad.detach().float() / share

        hook = loss.register_hook(note)  # type: ignore[no-untyped-call]
        try:
            return self._backward(loss, *args, **kwargs)
        finally:
            hook.remove()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's step; at the end of a window, compare."""
        if not self._engine.is_gradient_accumulation_boundary():
            return self._step(*args, **kwargs)
        true = self.sums.means()
        self.sums.sums.clear()
        self._captured.clear()
        outcome = self._step(*args, **kwargs)
        clip = float(self._engine.gradient_clipping() or 0.0)
        norm = torch.stack([mean.norm() for mean in true.values()]).norm()
        factor = (clip / (norm + 1e-6)).clamp(max=1) if clip > 0 else torch.ones_like(norm)
        pairs = [(g, true[name][start : start + g.numel()] * factor) for name, (start, g) in self._captured.items()]
        self.comparison.steps.append(compare(pairs, norm.device))
        return outcome

    def capture(self, *_: Any) -> None:
        """Copy the gradients that the optimizer has now."""
        if self._partition is None:
            self._capture_replicated()
            return
        for name, fragment in self._partition.fragments.items():
            grad = self._partition.flats[fragment.flat].grad
            if grad is not None:
                self._captured[name] = fragment.start, fragment.of(grad).detach().float().clone()

    def _capture_replicated(self) -> None:
        """Without ZeRO every rank has all: the parameters, fp32 copies of them, or a flat copy of each group."""
        names = {id(p): name for name, p in self._params.items()}
        zero = self._engine.optimizer
        for index, group in enumerate(self._inner.param_groups):
            own = getattr(zero, "fp16_groups", None)
            members = [p for p in (group["params"] if own is None else own[index]) if id(p) in names]
            grads = [p.grad.detach().float().reshape(-1) for p in group["params"] if p.grad is not None]
            flat, offset = torch.cat(grads) if grads else torch.zeros(0), 0
            for param in members:
                if offset + param.numel() <= flat.numel():
                    self._captured[names[id(param)]] = 0, flat[offset : offset + param.numel()].clone()
                offset += param.numel()


def _trained(engine: Any) -> dict[str, Tensor]:
    return {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
