"""`--set optimizer=onebit-adam,freeze_step=100`: the job's optimizer replaced by one that sends compressed values between ranks.

Groups, learning rate, betas, eps and weight decay are those of the optimizer that it replaces, which must be of Adam's family: the
job's own, or that of a ds_config.json. What the text names after the class replaces them, or sets what they do not have.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from halfstep.errors import SettingError, unknown
from halfstep.events import log_info
from halfstep.optim.onebit import OneBitAdam, OneBitLamb, ZeroOneAdam
from halfstep.optim.onebit.base import OneBitOptimizer

__all__ = ["check_optimizer", "replace_optimizer"]

_CLASSES: dict[str, type[OneBitOptimizer]] = {
    "onebit-adam": OneBitAdam,
    "zero-one-adam": ZeroOneAdam,
    "onebit-lamb": OneBitLamb,
}
_SHARED = ("lr", "betas", "eps", "weight_decay")  # of the job's groups
_BY_ENGINE = {"self", "params", "process_group", "local_gradients", "compute", "master", "states", "betas"}


def check_optimizer(text: str) -> None:
    """Raise for a text that names no optimizer, or a setting that it does not have."""
    _parse(text)


def replace_optimizer(text: str, optimizer: torch.optim.Optimizer) -> OneBitOptimizer:
    """The optimizer that a text names, over the groups of the one that the job or a ds_config.json has."""
    kind, settings = _parse(text)
    if not all("betas" in group for group in optimizer.param_groups):
        raise SettingError(
            f"optimizer={text}: {type(optimizer).__name__}, which it would replace, has no betas to continue with. Use Adam or AdamW in the job "
            f"(or in the DeepSpeed configuration, if that has an optimizer), or build halfstep.optim.{kind.__name__} in the job."
        )
    names = [name for name in _SHARED if name not in settings]
    groups = [
        {"params": group["params"]} | {name: group[name] for name in names if name in group}
        for group in optimizer.param_groups
    ]
    if "freeze_step" in inspect.signature(kind).parameters and "freeze_step" not in settings:
        settings["freeze_step"] = "auto"
        log_info(
            f"{kind.__name__} freezes its variance once that is stable (freeze_step=auto); steps are dense until then."
        )
    log_info(
        f"optimizer={text}: {kind.__name__} replaces {type(optimizer).__name__}, with its groups and {', '.join(names)}."
    )
    return kind(groups, **settings)


def _parse(text: str) -> tuple[type[OneBitOptimizer], dict[str, Any]]:
    name, *pairs = (part.strip() for part in text.split(","))
    kind = _CLASSES.get(name)
    if kind is None:
        raise unknown("optimizer", name, _CLASSES, "Leave it out for the job's own.")
    allowed = [key for key in inspect.signature(kind).parameters if key not in _BY_ENGINE]
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if key not in allowed:
            raise unknown(f"setting of {name}", key, allowed)
        if not equals or not value or key in settings:
            raise SettingError(f"optimizer={text}: write each setting once, as {key}=VALUE.")
        settings[key] = _value(value)
    return kind, settings


def _value(text: str) -> Any:
    switch = {"true": True, "false": False}.get(text.casefold())
    if switch is not None:
        return switch
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
