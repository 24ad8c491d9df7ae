"""Checks: what the Engine rejects before it changes anything, with the values seen and what to write instead."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.engine.ema import check_decay
from halfstep.engine.schedules import check_schedulers, required_arguments
from halfstep.engine.window import Window
from halfstep.errors import SettingError
from halfstep.events import log_once
from halfstep.hardware.units import few
from halfstep.precision.policy import Policy
from halfstep.scaling.scaler import Scaler, make_scaler

__all__ = [
    "check_assignment",
    "check_backward",
    "check_loss",
    "check_optimizers",
    "check_scaler",
    "check_settings",
    "check_step",
    "check_unscale",
    "choose_scaler",
    "fixed_names",
    "named_trainables",
    "require_backward",
]


def check_loss(loss: Any) -> None:
    """Raise for what cannot be backpropagated as one loss."""
    if not isinstance(loss, Tensor):
        raise SettingError(
            f"backward() takes the loss tensor, not {type(loss).__name__}; do not call .item() or float() on it first."
        )
    if loss.numel() != 1:
        raise SettingError(
            f"backward() takes one number, not a loss of shape {tuple(loss.shape)}; reduce it first, e.g. loss.mean()."
        )
    if not loss.requires_grad:
        raise SettingError(
            "backward() was called with a loss that has no graph: it was computed under no_grad (engine.evaluate()?), detached, or from "
            "frozen parameters only. Compute it inside `with engine.forward():`."
        )


def check_scaler(scaler: Scaler, compute: str) -> None:
    """Raise for a scaler that contradicts the compute format."""
    mode = scaler.settings.mode
    if compute == "fp16" and mode == "none":
        raise SettingError(
            "scaler=NoScaler() under fp16 lets gradients below 6e-08 vanish; use LossScaler(), or StaticScaler(1) to insist."
        )
    if compute != "fp16" and mode != "none":
        raise SettingError(
            f"scaler={scaler!r} has no effect under {compute} compute, which has fp32's range; omit scaler=."
        )


def choose_scaler(scaler: Scaler | None, policy: Policy) -> Scaler:
    """The scaler that was passed to the Engine, checked, or the policy's own."""
    if scaler is not None and not isinstance(scaler, Scaler):
        raise SettingError(_not_a_scaler(scaler))
    chosen = make_scaler(policy.scaling) if scaler is None else scaler
    check_scaler(chosen, policy.compute)
    return chosen


def fixed_names(engine: object, cls: type, own: Collection[str]) -> frozenset[str]:
    """The public names of a built Engine that nobody may assign to: its options, attributes and methods; `own` are a subclass's."""
    names = {*inspect.signature(cls).parameters, *vars(engine), *dir(cls)} - set(own)
    return frozenset(name for name in names if not name.startswith("_"))


def check_assignment(name: str, value: Any, fixed: Collection[str]) -> None:
    """Raise for assigning to an option, attribute or method of an Engine that is built."""
    if name in fixed:
        raise SettingError(
            f"engine.{name} = {reprlib.repr(value)}: an Engine is fixed when it is built, and this would change nothing. Pass {name}= to "
            "Engine(...) if it is one of its options; to change it during a run, close() this engine and build a new one."
        )


def _not_a_scaler(scaler: Any) -> str:
    text = f"Engine(scaler=...) takes halfstep.LossScaler, StaticScaler or NoScaler, not {type(scaler).__name__}."
    if not isinstance(scaler, torch.amp.GradScaler):
        return text
    if not scaler.is_enabled():
        return f"{text} This one is disabled: omit scaler=."
    settings = (
        f'semantics="torch", hysteresis=1, init_scale={scaler.get_scale():g}, growth_factor={scaler.get_growth_factor():g}, '
        f"backoff_factor={scaler.get_backoff_factor():g}, growth_interval={scaler.get_growth_interval()}"
    )
    return f"{text} The Engine scales, unscales and skips itself. For the same loss scale write scaler=halfstep.LossScaler({settings})."


def check_settings(
    optimizers: Sequence[Any], schedulers: Sequence[Any], max_norm: Any, accumulate: Any, ema: Any
) -> None:
    """Raise for an Engine that cannot work, before anything is changed."""
    check_optimizers(optimizers)
    if max_norm is not None:
        number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool)
        if not number or not math.isfinite(max_norm) or max_norm <= 0:
            raise SettingError(f"max_norm={max_norm!r} must be a number above 0; max_norm=None does not clip.")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise SettingError(f"accumulate={accumulate!r} must be a whole number of micro-batches, 1 or more.")
    if ema is not None:
        check_decay(ema)
    check_schedulers(schedulers, optimizers)


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Raise for what cannot be stepped by the Engine."""
    if not optimizers:
        raise SettingError("Engine(optimizer=...) is empty; pass one optimizer or a list of them.")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SettingError(f"Engine(optimizer=...) takes torch.optim optimizers, not {type(optimizer).__name__}.")
        _check_one_step(optimizer)


def _check_one_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that needs more than one gradient per update: two steps (SAM), or a closure (LBFGS)."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SettingError(
            "LBFGS calls the model again inside step(), which no loss scale can follow; use it in fp32 without the Engine."
        )
    two_steps = [m for m in ("first_step", "second_step", "set_closure") if callable(getattr(optimizer, m, None))]
    if not two_steps and "closure" not in required_arguments(optimizer.step):
        return
    base = getattr(optimizer, "base_optimizer", None)
    inner = (
        f"{type(base).__name__}, its base_optimizer,"
        if isinstance(base, torch.optim.Optimizer)
        else "its base optimizer"
    )
    reason = f"it has {' and '.join(m + '()' for m in two_steps)}" if two_steps else "its step() needs a closure"
    raise SettingError(
        f"{name} computes several gradients per update ({reason}), and the Engine scales, checks and clips one. Pass {inner} to the Engine "
        "and write the first step in the loop: engine.backward(loss), engine.unscale(), change the weights and keep copies of the old "
        "ones, engine.reset_window(), the second forward and engine.backward(loss), copy the old weights back, engine.step(). "
        'docs/engine.md has the program under "Two-step optimizers".'
    )


def named_trainables(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The parameters that the optimizers own, by the model's names; raises unless each belongs to one optimizer."""
    names = {id(p): name for name, p in model.named_parameters()}
    _check_strangers(names.keys(), optimizers)
    owner: dict[int, int] = {}
    params: dict[str, Tensor] = {}
    for index, optimizer in enumerate(optimizers):
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            if owner.setdefault(id(param), index) != index:
                raise SettingError(
                    f"Parameter {names[id(param)]} is in two optimizers and would be stepped twice. Give it to one."
                )
            params[names[id(param)]] = param
    if not any(p.requires_grad for p in params.values()):
        raise SettingError("No parameter in the optimizer requires a gradient; there is nothing to train.")
    _check_devices(params)
    idle = [name for name, p in model.named_parameters() if p.requires_grad and name not in params]
    if idle:
        log_once(f"Trainable parameters that are in no optimizer are not updated: {few(idle)}.")
    return params


def _check_strangers(known: Collection[int], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise for parameters of an optimizer that are not in the model, and show which they are."""
    for optimizer in optimizers:
        num_owned, strangers = 0, []
        for number, group in enumerate(optimizer.param_groups):
            num_owned += len(group["params"])
            for index, param in enumerate(group["params"]):
                if id(param) not in known:
                    strangers.append(f"param_groups[{number}]['params'][{index}] of shape {tuple(param.shape)}")
        if strangers:
            raise SettingError(
                f"{type(optimizer).__name__} has {len(strangers)} of {num_owned} parameters that are not in the model: {few(strangers)}. Build the "
                "optimizer from model.parameters(), after moving the model to its device; to train several modules or loose parameters, pass "
                "them all: Engine([model, parameter], ...) or Engine({'model': model, 'log_alpha': log_alpha}, ...)."
            )


def _check_devices(params: dict[str, Tensor]) -> None:
    by_kind: dict[str, list[str]] = {}
    for name, param in params.items():
        by_kind.setdefault(param.device.type, []).append(name)
    if len(by_kind) > 1:  # autocast is entered for one kind of device, and the others would not be in it
        places = " and ".join(f"on {kind} ({few(names)})" for kind, names in by_kind.items())
        raise SettingError(
            f"The model's parameters are {places}. Move the whole model with model.to(device) before its optimizer and Engine are built; "
            "`with torch.device(...):` does not move what torch.Tensor(...) creates."
        )


def check_backward(window: Window, *, weighted: bool, released: bool) -> None:
    """Raise where `backward` cannot add to this window."""
    if window.found_inf is not None:
        raise SettingError("backward() after unscale(): these gradients are already divided. Call step() first.")
    if released and (weighted or window.has_gradients):
        raise SettingError(
            "With gradient_release the update happens inside backward(): call it once per step, and without weight=."
        )


def check_unscale(window: Window, *, released: bool) -> None:
    """Raise where there is nothing left to unscale."""
    if released:
        raise SettingError("unscale() has nothing to divide: with gradient_release the gradients are already used.")
    if window.found_inf is not None:
        raise SettingError("unscale() was already called in this window; call step() before the next.")


def check_step(depth: int) -> None:
    """Raise for a step inside a block of the Engine."""
    if depth:
        raise SettingError(
            "step() was called inside `with engine.forward():`. Leave the block first: cast weights are cached in it."
        )


def require_backward(window: Window, method: str) -> None:
    """Raise for a call that needs the gradients of this window before there are any."""
    if not window.has_gradients:
        raise SettingError(
            f"{method}() without engine.backward(loss) in this window. A bare loss.backward() leaves gradients unscaled; "
            "write engine.backward(loss)."
        )
