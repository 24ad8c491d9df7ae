"""The settings that the lean optimizers share: their checks, and what maximize and weight decay mean."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from halfstep.errors import SettingError

__all__ = ["as_scalar", "check_betas", "check_not_negative", "decayed"]


def check_not_negative(**settings: float | Tensor) -> None:
    """Raise for a setting that is negative or NaN, and for a tensor of more than one element."""
    for name, value in settings.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise SettingError(f"{name} has {value.numel()} elements; pass a number or a tensor of one element.")
        if not value >= 0:
            raise SettingError(f"{name}={value!r} must be 0 or more.")


def check_betas(betas: tuple[float | Tensor, float | Tensor]) -> None:
    """Raise for decay rates outside [0, 1), and for one of them as a tensor."""
    if len({isinstance(beta, Tensor) for beta in betas}) > 1:
        raise SettingError(f"betas={betas!r} must be two numbers or two tensors.")
    if not all(0 <= beta < 1 for beta in betas):
        raise SettingError(f"betas={betas!r} must lie in [0, 1).")


def as_scalar(value: float | Tensor) -> float | Tensor:
    """A setting that broadcasts to any shape: a tensor of one element without its dimensions."""
    return value.reshape(()) if isinstance(value, Tensor) else value


def decayed(group: dict[str, Any], master: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The master after decoupled weight decay, and the gradient: negated to maximize, with weight decay that is not decoupled."""
    decay = group["weight_decay"]
    if group["maximize"]:
        grad = -grad
    if decay and group.get("decoupled_weight_decay"):
        master = master * (1 - as_scalar(group["lr"]) * decay)
    elif decay:
        grad = grad.add(master, alpha=decay)
    return master, grad
