"""What the Engine refuses, and how it notices: settings, losses, and gradients touched behind its back.

Gradients between `backward` and `step` are multiplied by the loss scale. A bare `loss.backward()` adds unscaled ones to
them, and clipping or editing them by hand works on numbers that are 65536 times too large; both train on, wrongly and
silently. Every tensor has a version that counts its in-place changes, so the Engine notes the version of each gradient
after its own backward and compares before it goes on. That costs no device work.

While a forward runs, the gradients of its window are sometimes in the way, and are set aside. A model compiled into CUDA
graphs writes its gradients to the same memory at every replay: until the next forward they are good, so a step over one
micro-batch uses them where they are, but those that must outlive a forward (accumulation, a second loss) move out once
per window, and from then on autograd adds to the copy in place. And torch.compile cannot trace a 16-bit weight that has
an fp32 gradient: it gives up at every layer. So where gradients are summed in fp32, weights have none during a forward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import SettingError
from halfstep.events import say
from halfstep.hardware.units import few
from halfstep.scaling.scaler import Scaler

__all__ = ["GradientWatch", "advance", "check_loss", "check_scaler", "check_settings", "named_trainables"]


class GradientWatch:
    """Notices gradients that changed outside the Engine, and parameters that optimizers got after it was made."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        in_graphs: bool = False,
        hide: bool = False,
    ) -> None:
        self._params, self._in_graphs, self._hide = params, in_graphs, hide
        self._optimizers, self._num_owned = optimizers, _num_owned(optimizers)
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self._moved: set[str] = set()  # out of a graph's memory
        self._aside: dict[str, Tensor] = {}

    def remember(self) -> None:
        """Take the gradients as they are for the Engine's own."""
        self._seen = {n: (p.grad, p.grad._version) for n, p in self._params.items() if p.grad is not None}  # noqa: SLF001

    def forget(self) -> None:
        """Expect no gradients."""
        self._seen, self._moved, self._aside = {}, set(), {}

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Keep the gradients out of the way of a forward; one that was edited stays noticed."""
        if self._in_graphs:
            self._move_out()
        if self._hide:
            for name, param in self._params.items():
                if param.grad is not None:
                    self._aside[name], param.grad = param.grad, None
        try:
            yield
        finally:
            self._put_back()

    def _put_back(self) -> None:
        """Give the weights their gradients again; one that was made meanwhile stays, and is noticed."""
        for name, grad in self._aside.items():
            if self._params[name].grad is None:
                self._params[name].grad = grad
        self._aside.clear()

    def _move_out(self) -> None:
        for name, param in self._params.items():
            old = param.grad
            if old is None or name in self._moved:
                continue
            param.grad = old.clone()
            self._moved.add(name)
            seen = self._seen.get(name)
            if seen is not None and seen[0] is old and seen[1] == old._version:  # noqa: SLF001
                self._seen[name] = (param.grad, param.grad._version)  # noqa: SLF001

    def check(self, what: str) -> None:
        """Raise if a gradient appeared, changed or went since `remember`, or an optimizer has new parameters."""
        self._put_back()  # where this is asked inside the block of a forward
        added = _num_owned(self._optimizers) - self._num_owned
        if added:
            raise SettingError(
                f"{what}() found {added:+d} parameters in the optimizer since the Engine was made (add_param_group?); the Engine would not "
                "check or clip them. Give the optimizer every parameter at the start (one with requires_grad=False waits until it is "
                "unfrozen), or close() this engine and make a new one."
            )
        changed, gone = [], []
        for name, param in self._params.items():
            grad, seen = param.grad, self._seen.get(name)
            if grad is None:
                if seen is not None:
                    gone.append(name)
            elif seen is None or seen[0] is not grad or seen[1] != grad._version:  # noqa: SLF001
                changed.append(name)
        if gone:
            raise SettingError(
                f"{what}() found the gradients of {few(gone)} cleared since engine.backward(). The Engine clears gradients itself "
                "after a step; remove optimizer.zero_grad() from the loop."
            )
        if changed and not self._seen:
            raise SettingError(
                f"{what}() found gradients that engine.backward() did not make ({few(changed)}): a bare loss.backward(), another engine's "
                "backward through this model, or left over from before. Write engine.backward(loss), freeze this model "
                "(requires_grad_(False)) where another is trained through it, and clear old gradients with model.zero_grad()."
            )
        if changed:
            raise SettingError(
                f"{what}() found the gradients of {few(changed)} changed since engine.backward(): clipped or edited by hand, a bare "
                "loss.backward(), another engine's backward through this model, or a backward that failed halfway. They are still "
                "multiplied by the loss scale. Use Engine(max_norm=...) to clip, or call engine.unscale() first and edit then; "
                "engine.reset_window() drops this window and begins a new one."
            )


def _num_owned(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    return sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)


def check_loss(loss: Any) -> None:
    """Refuse what cannot be backpropagated as one loss."""
    if not isinstance(loss, Tensor):
        raise SettingError(
            f"backward() takes the loss tensor, not {type(loss).__name__}; do not call .item() or float() on it before."
        )
    if loss.numel() != 1:
        raise SettingError(
            f"backward() takes one number, not a loss of shape {tuple(loss.shape)}; reduce it first, e.g. loss.mean()."
        )
    if not loss.requires_grad:
        raise SettingError(
            "backward() was given a loss without a graph: it was computed under no_grad (engine.evaluate()?), detached, or from frozen "
            "parameters only. Compute it inside `with engine.forward():`."
        )


def check_scaler(scaler: Scaler, compute: str) -> None:
    """Refuse a scaler that contradicts the compute format."""
    mode = scaler.settings.mode
    if compute == "fp16" and mode == "none":
        raise SettingError(
            "scaler=NoScaler() under fp16 lets gradients below 6e-08 vanish; use LossScaler(), or StaticScaler(1) to insist."
        )
    if compute != "fp16" and mode != "none":
        raise SettingError(
            f"scaler={scaler!r} has no use under {compute} compute, which has fp32's range; leave scaler= out."
        )


def advance(schedulers: Sequence[Any], applied: int) -> None:
    """Advance every scheduler for the update that was just applied."""
    for scheduler in schedulers:
        try:
            scheduler.step()
        except ValueError as error:  # OneCycleLR at its end
            raise SettingError(
                f"{type(scheduler).__name__} could not be stepped after update {applied}: {error}. The Engine steps schedulers once "
                "per update: make it for as many as the run has, which is epochs x batches / accumulate."
            ) from error


def check_settings(
    model: Any, optimizers: Sequence[Any], schedulers: Sequence[Any], max_norm: Any, accumulate: Any
) -> None:
    """Refuse an Engine that cannot work, before anything is changed."""
    if not isinstance(model, nn.Module):
        raise SettingError(f"Engine(model=...) takes a torch.nn.Module, not {type(model).__name__}.")
    if not optimizers:
        raise SettingError("Engine(optimizer=...) was given no optimizer.")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SettingError(f"Engine(optimizer=...) takes torch.optim optimizers, not {type(optimizer).__name__}.")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise SettingError(
                "LBFGS calls the model again inside step(), which no loss scale can follow; use it without the Engine."
            )
    if max_norm is not None:
        number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool)
        if not number or not math.isfinite(max_norm) or max_norm <= 0:
            raise SettingError(f"max_norm={max_norm!r} must be a number above 0; max_norm=None does not clip.")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise SettingError(f"accumulate={accumulate!r} must be a whole number of micro-batches, 1 or more.")
    for scheduler in schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise SettingError(
                "ReduceLROnPlateau needs a metric at each step; call scheduler.step(metric) yourself after validation."
            )
        if not callable(getattr(scheduler, "step", None)):
            raise SettingError(f"scheduler={scheduler!r} has no step(); pass a torch.optim.lr_scheduler.")
        if not any(getattr(scheduler, "optimizer", o) is o for o in optimizers):
            raise SettingError(
                "The scheduler was built on another optimizer than the Engine's, so it would change nothing."
            )


def named_trainables(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The parameters the optimizers own, by the model's names."""
    names = {id(p): name for name, p in model.named_parameters()}
    owner: dict[int, int] = {}
    found: dict[str, Tensor] = {}
    for index, optimizer in enumerate(optimizers):
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            if id(param) not in names:
                raise SettingError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} that is not in the model. Build the "
                    "optimizer from model.parameters(), after moving the model to its device."
                )
            if owner.setdefault(id(param), index) != index:
                raise SettingError(
                    f"Parameter {names[id(param)]} is in two optimizers; it would be stepped twice. Give it to one."
                )
            found[names[id(param)]] = param
    if not any(p.requires_grad for p in found.values()):
        raise SettingError("No parameter in the optimizer requires a gradient; there is nothing to train.")
    places: dict[str, list[str]] = {}
    for name, param in found.items():
        places.setdefault(param.device.type, []).append(name)
    if len(places) > 1:  # a 16-bit region is one device's, and the others would not be in it
        where = " and ".join(f"on {kind} ({few(names)})" for kind, names in places.items())
        raise SettingError(
            f"The model's parameters are {where}. Move the whole model with model.to(device) before its optimizer and Engine are made; "
            "`with torch.device(...):` does not move what torch.Tensor(...) makes."
        )
    idle = [name for name, p in model.named_parameters() if p.requires_grad and name not in found]
    if idle:
        say(f"Trainable parameters that are in no optimizer stay as they are: {few(idle)}.")
    return found
