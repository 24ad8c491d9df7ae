"""What every integration does, whichever library owns the loop: watch it, examine what it skips, stop it when it is stuck.

A library tells the Monitor three things: how a micro-batch can be computed again, the loss of each, and when a step is over.
The rest is `halfstep.Watch` on the optimizer and the scaler that the library made, and, where there is no scaler, a
`halfstep.Guard`, so that a NaN never reaches the weights. No step after the first waits for the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import OverflowStop, SettingError
from halfstep.events import log_info, log_once
from halfstep.inspection.inspector import inspect
from halfstep.inspection.result import Inspection
from halfstep.optim.shards import is_sharded
from halfstep.scaling.readback import Readback
from halfstep.watching.events import Event
from halfstep.watching.guard import Guard
from halfstep.watching.watch import Watch

__all__ = ["Monitor", "Outlet", "own_optimizer"]

Outlet = Callable[[Event], None]
_SHARDED = (
    "Halfstep: the parameters are sharded (FSDP2). Samples and skips are those of the whole parameters, the same on every rank; skipped "
    "steps are not computed again."
)
_FLAT = (
    "Halfstep: the model is FullyShardedDataParallel, the first version. Its gradients are guarded and losses are watched, but nothing is "
    "sampled, and with a loss scaler max_skips has no effect. FSDP2 (fully_shard) has all of it."
)


class Monitor:
    """Watches one training loop until `close()`.

    `every` is the number of steps between samples; `max_skips` skipped steps in a row raise OverflowStop (None: never); each
    Event is passed to every one of `outlets`. `start` is the number of steps that a resumed run has taken already.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None = None,
        *,
        every: int = 100,
        activations: bool = False,
        max_skips: int | None = 25,
        outlets: Sequence[Outlet] = (),
        start: int = 0,
    ) -> None:
        self._max_skips, self._outlets = max_skips, tuple(outlets)
        self._inspected = (model, list(optimizers), scaler)
        self.truth: Inspection | None = None  # known after the first step
        self._readback, self._step, self._undo = Readback(), start, contextlib.ExitStack()
        self._loss: Tensor | None = None  # of the step in progress
        self._has_returned = False  # whether a model has returned a loss since the last backward
        optimizers = [own_optimizer(each) for each in optimizers]
        sharded = any(is_sharded(p) for each in optimizers for group in each.param_groups for p in group["params"])
        flat = any(base.__name__ == "FullyShardedDataParallel" for m in model.modules() for base in type(m).__mro__)
        group = torch.distributed.group.WORLD if sharded or flat else None
        self._guards: list[Guard] = []
        if scaler is None or not scaler.is_enabled():
            names = list(model.named_parameters())
            self._guards = [Guard(o, max_skips, named_parameters=names, process_group=group) for o in optimizers]
        self.watch = Watch(model, every=every, activations=activations, outlet=self._sent)
        self._can_record = not sharded and not flat and len(optimizers) == 1
        if sharded or flat:
            log_once(_FLAT if flat else _SHARDED)
        if not flat:
            self.watch.attach(optimizers, scaler, start=start)

    def record(self, compute_loss: Callable[[], Any], factor: float = 1.0) -> None:
        """Before the forward of a micro-batch: how to compute its loss again, and what the loop multiplies it by."""
        if self._can_record:
            self.watch.record(compute_loss, factor)

    def follow(self, model: nn.Module, accumulate: int = 1) -> None:
        """Record every training forward of a model that returns its loss, as those of transformers do, until `close()`.

        `accumulate` is the number that the loop divides each loss by, unless the model has divided it by the items of the step.
        """

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._is_training(model):
                factor = 1.0 if "num_items_in_batch" in kwargs else 1.0 / accumulate
                self.record(functools.partial(_loss_of, model, args, kwargs), factor)

        def after(_: nn.Module, __: Any, output: Any) -> None:
            if self._is_training(model):
                self._has_returned |= isinstance(loss := _loss_in(output), Tensor)
                self.add_loss(loss)

        self.on_close(model.register_forward_pre_hook(before, with_kwargs=True).remove)
        self.on_close(model.register_forward_hook(after).remove)

    @property
    def is_replaying(self) -> bool:
        """Whether a forward that runs now is that of a replay."""
        return self.watch.is_replaying

    def _is_training(self, model: nn.Module) -> bool:
        return not self.is_replaying and model.training and torch.is_grad_enabled()

    def add_loss(self, loss: Any) -> None:
        """A micro-batch's share of the loss of the step, on the device."""
        if isinstance(loss, Tensor):
            part = loss.detach()
            # A copy in any case: the loop may modify its tensor.
            part = part.clone() if part.dtype is torch.float32 and not part.dim() else part.sum(dtype=torch.float32)
            self._loss = part if self._loss is None else self._loss + part

    def add_other_loss(self, loss: Any) -> None:
        """The loss of a backward pass, unless it is one that the model returned, which was added already."""
        if not self._has_returned:
            self.add_loss(loss)
        self._has_returned = False

    def on_close(self, undo: Callable[[], Any]) -> None:
        """Call this, too, when the Monitor is closed."""
        self._undo.callback(undo)

    def end_step(self) -> None:
        """A step is over: its loss is read when it has arrived. After the first one the truth table is logged."""
        self._step += 1
        if self.truth is None:
            self.truth = inspect(*self._inspected).result
            log_info(f"What this run stores:\n{self.truth}")
        loss, self._loss = self._loss, None
        if loss is not None and loss.is_cpu:
            self.watch.observe_loss(self._step, loss.item())
        elif loss is not None:
            self._readback.push(loss.reshape(1), self._step)
            self._observe_losses(wait=False)

    def close(self) -> None:
        """Deliver what is pending, and remove every hook and Guard."""
        self._undo.close()
        self._observe_losses(wait=True)
        self.watch.close()
        for guard in self._guards:
            guard.close()

    def _observe_losses(self, *, wait: bool) -> None:
        for step, (loss,) in self._readback.deliver(wait=wait):
            self.watch.observe_loss(step, loss)

    def _sent(self, event: Event) -> None:
        for outlet in self._outlets:
            outlet(event)
        # A Guard stops by itself.
        if self._max_skips is None or self._guards or event.kind != "skip":
            return
        if event.data["consecutive"] >= self._max_skips:
            raise OverflowStop(
                f"{event.data['consecutive']} steps in a row were skipped because of non-finite gradients (max_skips={self._max_skips}); the "
                f"last, {event} Usual causes: NaN or inf in the data or the loss, weights that are not finite, or values beyond the "
                "range of fp16. max_skips=None never stops."
            )


def own_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside a library's wrapper: Accelerate, Lightning and Fabric call it `optimizer`."""
    own: torch.optim.Optimizer = optimizer
    while isinstance(inner := getattr(own, "optimizer", None), torch.optim.Optimizer):
        own = inner
    return own


def _loss_in(output: Any) -> Any:
    """The loss in a model's output, if it has one."""
    return output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)


def _loss_of(model: nn.Module, args: Any, kwargs: Any) -> Tensor:
    loss = _loss_in(model(*args, **kwargs))
    if not isinstance(loss, Tensor):
        raise SettingError("the model returned no loss: the loop computes one of its own, which Halfstep does not know")
    return loss
