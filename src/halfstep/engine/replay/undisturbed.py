"""A block in which a step is computed again, and after which the training is bit for bit as before.

Set aside and put back: gradients (on a GPU those of the next window are there already), the contents and objects of
all buffers, the generators, the mode of the modules, cast weights in autocast's cache. Weights, masters, moments, EMA, loss
scale and counters are never written: a replay calls neither the optimizers nor the scaler. Not covered is what no registry
lists: a Python attribute that a forward changes, and generators of the user's own.

Compiled code runs in eager mode here (torch.compiler.set_stance), because only there can operations be observed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.engine.region import compute_region, recomputing
from halfstep.engine.replay.record import Generators, MicroBatch, Replays
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["MESSAGES", "BufferCopies", "MessageError", "compute_losses", "run_backward", "scale_losses", "undisturbed"]

MESSAGES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")  # namespaces of torch.distributed's operations


@contextlib.contextmanager
def undisturbed(replays: Replays) -> Iterator[None]:
    """Compute a skipped step again in this block."""
    run = replays.run
    generators = Generators.now(run.device)
    with contextlib.ExitStack() as undo:
        undo.callback(generators.restore)
        undo.callback(torch.clear_autocast_cache)
        undo.enter_context(torch.inference_mode(mode=False))
        undo.enter_context(torch.enable_grad())
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(_modes(run.module))
        undo.enter_context(_gradients(run.module, run.params))
        undo.callback(BufferCopies(run.module).restore)
        torch.clear_autocast_cache()
        if replays.is_one_of_several:
            undo.enter_context(_NoMessages())  # type: ignore[no-untyped-call]
        yield


def compute_losses(replays: Replays, batch: MicroBatch) -> list[Tensor]:
    """The losses of a micro-batch, computed in the Engine's precision with its random numbers, from the buffers as they are."""
    run, policy = replays.run, replays.run.policy
    assert batch.compute_loss is not None
    batch.generators.restore()
    if run.module.training != batch.training:
        run.module.train(batch.training)
    region = compute_region(run.device.type, policy.compute, lean=policy.is_lean)
    # On one of several ranks the backend must not notice: its next messages belong to the step in progress.
    around = contextlib.nullcontext() if replays.is_one_of_several else replays.backend.forward_context(last=True)
    with around, region:
        losses = batch.compute_loss()
    return [losses] if isinstance(losses, Tensor) else list(losses)


def scale_losses(replays: Replays, losses: list[Tensor], factor: float | Tensor, scale: float) -> list[Tensor]:
    """The losses multiplied as Engine.backward multiplies them."""
    if replays.scaler.settings.mode != "none":
        wide = [loss.float() if loss.dtype in DTYPES_16_BIT else loss for loss in losses]
        losses = [loss * torch.full((), scale, device=loss.device) for loss in wide]
    if isinstance(factor, Tensor):
        return [loss * factor.to(loss.device) for loss in losses]
    return losses if factor == 1.0 else [loss * factor for loss in losses]


def run_backward(replays: Replays, scaled: list[Tensor], *, retain_graph: bool = False) -> None:
    """Backpropagate scaled losses as Engine.backward does."""
    rule = recomputing(lean=replays.run.policy.is_lean)
    with torch.autocast(replays.run.device.type, enabled=False), rule:
        for index, loss in enumerate(scaled):
            retains = retain_graph or index + 1 < len(scaled)
            if replays.is_one_of_several:
                loss.backward(retain_graph=retains)  # type: ignore[no-untyped-call]
            else:
                replays.backend.backward(loss, retain_graph=retains)


class MessageError(Exception):
    """The code of a step that is computed again on one rank has called a collective operation."""


class _NoMessages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises for messages between ranks: the others do not compute the step again, and would never answer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in MESSAGES:
            raise MessageError(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _modes(module: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in module.modules()]
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training


@contextlib.contextmanager
def _gradients(module: nn.Module, params: dict[str, Tensor]) -> Iterator[None]:
    """Take the gradients away, and put the same objects back."""
    every = {id(p): p for p in (*module.parameters(), *params.values())}.values()
    grads = [(param, param.grad) for param in every]
    try:
        for param, _ in grads:
            param.grad = None
        yield
    finally:
        for param, grad in grads:
            param.grad = grad


class BufferCopies:
    """The buffers of a model as they are: objects and contents."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [(m._buffers, dict(m._buffers)) for m in module.modules()]  # noqa: SLF001 - objects, shared ones too
        every = {id(b): b for _, table in self._tables for b in table.values() if b is not None}.values()
        self._copies = [(b, b.detach().clone()) for b in every if b.device.type != "meta"]

    @torch.no_grad()
    def restore(self) -> None:
        """Put objects and contents back."""
        for table, before in self._tables:
            if list(map(id, table.values())) != list(map(id, before.values())):
                table.clear()
                table.update(before)
        for buffer, copy in self._copies:
            if buffer.layout is torch.strided and not _is_expanded(buffer):
                buffer.copy_(copy)


def _is_expanded(buffer: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
