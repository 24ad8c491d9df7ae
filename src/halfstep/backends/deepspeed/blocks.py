"""The optimizer and the scheduler that a DeepSpeed configuration describes, built with torch's own classes.

DeepSpeed builds its fused or CPU Adam for "Adam" and "AdamW"; both are AdamW unless `adam_w_mode` is false, and both decay
no weights unless asked to, where torch's AdamW decays them by 0.01. Any other name is a class of torch.optim. Its warm-up
schedules are written here as factors of torch's LambdaLR, with DeepSpeed's counting: the first update uses the lowest rate,
and so does the second, because its count starts at -1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from halfstep.errors import SettingError, unknown
from halfstep.precision.deepspeed_keys import is_auto, rejected
from halfstep.precision.deepspeed_optimizers import BUILT_IN, TORCH

__all__ = ["build_optimizer", "build_scheduler", "is_left_open"]

_ADAMS = ("adam", "adamw")
# Arguments of DeepSpeed's Adam that torch's does not have, with the values under which both do the same.
_ADAM_ONLY: dict[str, tuple[object, ...]] = {
    "bias_correction": (True,),
    "fp32_optimizer_states": (True,),
    "set_grad_none": (True, False),
    "adamw_mode": (True,),
}
_ELSEWHERE = "it is not a class of torch.optim; write one of torch's, or remove the block and pass your own optimizer"


def is_left_open(block: object) -> bool:
    """Whether a block has only "auto" values, which leave the object to the program."""
    params = block.get("params") if isinstance(block, Mapping) else None
    return isinstance(params, Mapping) and bool(params) and all(map(is_auto, params.values()))


def build_optimizer(block: Mapping[str, Any], params: Iterable[Any]) -> Optimizer:
    """The optimizer of an `optimizer` block; raises for one that torch does not have."""
    kind, settings = _read("optimizer", block)
    if kind.casefold() in _ADAMS:
        decoupled = settings.pop("adam_w_mode", True) or kind.casefold() == "adamw"
        if not settings.pop("torch_adam", False):
            settings.setdefault("weight_decay", 0.0)
        for name, same in _ADAM_ONLY.items():
            if name in settings and settings[name] not in same:
                raise rejected(
                    f"optimizer.params.{name}", settings[name], "torch's Adam has no such setting; remove it"
                )
            settings.pop(name, None)
        cls: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
    elif kind in TORCH:
        cls = getattr(torch.optim, kind)
    elif kind.casefold() in BUILT_IN:
        raise rejected("optimizer.type", kind, _ELSEWHERE)
    else:
        raise unknown("optimizer", kind, ["Adam", *TORCH], "It is `optimizer.type` of the DeepSpeed configuration.")
    if isinstance(settings.get("betas"), list):
        settings["betas"] = tuple(settings["betas"])
    built: Optimizer = _call("optimizer", cls, list(params), settings)
    return built


def build_scheduler(block: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """The scheduler of a `scheduler` block, stepped once per update; raises for one that torch does not have."""
    kind, settings = _read("scheduler", block)
    warm_up = _WARM_UPS.get(kind)
    if kind in {"OneCycle", "LRRangeTest"}:
        reason = "it is a class of DeepSpeed; use WarmupLR, WarmupDecayLR, WarmupCosineLR or a class of torch.optim.lr_scheduler"
        raise rejected("scheduler.type", kind, reason)
    cls: Any = warm_up or getattr(torch.optim.lr_scheduler, kind, None)
    if warm_up is None and not (isinstance(cls, type) and issubclass(cls, LRScheduler)):
        raise unknown("scheduler", kind, _WARM_UPS, "It is `scheduler.type` of the DeepSpeed configuration.")
    built: LRScheduler = _call("scheduler", cls, optimizer, settings)
    return built


def _read(name: str, block: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    kind, params = block.get("type"), block.get("params") or {}
    if not isinstance(kind, str) or not isinstance(params, Mapping):
        raise rejected(name, block, 'it must be a block with a "type" and "params"')
    for key, value in params.items():
        if is_auto(value):
            reason = f'some values of the block are "auto" and others are not; write this one, or make all of them "auto" to use your own {name}'
            raise rejected(f"{name}.params.{key}", value, reason)
    return kind, dict(params)


def _call(name: str, cls: Callable[..., Any], first: Any, settings: dict[str, Any]) -> Any:
    try:
        return cls(first, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise SettingError(
            f"The {name} block of the DeepSpeed configuration, {getattr(cls, '__name__', cls)} with {settings}, cannot be built: {error}."
        ) from error


# --- DeepSpeed's schedules --------------------------------------------------------------------------------------------


def _warm_up_lr(
    optimizer: Optimizer,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    total_num_steps: int | None = None,
) -> LambdaLR:
    """From the lowest to the highest rate, then constant, or linearly to 0 at `total_num_steps`."""
    steps = _warm_up_steps(warmup_num_steps)
    rise = _rise(warmup_type, steps)

    def gamma(count: int) -> float:
        if count < steps:
            return rise(count)
        if total_num_steps is None:
            return 1.0
        return max(0.0, (total_num_steps - count) / max(1.0, total_num_steps - steps))

    highest = [group["lr"] if warmup_max_lr is None else warmup_max_lr for group in optimizer.param_groups]
    if any(isinstance(rate, list) or rate <= 0 for rate in (*highest, warmup_min_lr + 1)):
        raise ValueError(
            f"warmup_max_lr={warmup_max_lr} and warmup_min_lr={warmup_min_lr} must be numbers, above 0 and not below it"
        )
    for group, rate in zip(optimizer.param_groups, highest, strict=True):
        group["lr"] = rate

    def factor_of(rate: float) -> Callable[[int], float]:
        low = warmup_min_lr / rate
        return lambda count: low if count == 0 else low + (1 - low) * gamma(count - 1)

    return LambdaLR(optimizer, [factor_of(rate) for rate in highest])


def _warm_up_decay_lr(
    optimizer: Optimizer, total_num_steps: int, warmup_max_lr: float = 0.001, **settings: Any
) -> LambdaLR:
    return _warm_up_lr(optimizer, warmup_max_lr=warmup_max_lr, total_num_steps=total_num_steps, **settings)


def _warm_up_cosine_lr(
    optimizer: Optimizer,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> LambdaLR:
    """From a share of the optimizer's rate to all of it, then along a cosine."""
    steps = _warm_up_steps(warmup_num_steps)
    rise = _rise(warmup_type, steps)

    def factor(count: int) -> float:
        if count == 0:
            return 0.0
        done = count - 1
        if done < steps:
            return warmup_min_ratio + rise(done) * (1 - warmup_min_ratio)
        progress = min(1.0, (done - steps + 1) / max(1, total_num_steps - steps))
        return max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)

    return LambdaLR(optimizer, factor)


def _warm_up_steps(count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"warmup_num_steps={count!r} must be an integer of at least 1")
    return max(2, count)


def _rise(kind: str, steps: int) -> Callable[[int], float]:
    if kind == "log":
        return lambda count: math.log(count + 1) / math.log(steps)
    if kind == "linear":
        return lambda count: count / steps
    raise ValueError(f"warmup_type={kind!r} must be 'log' or 'linear'")


_WARM_UPS: dict[str, Callable[..., LambdaLR]] = {
    "WarmupLR": _warm_up_lr,
    "WarmupDecayLR": _warm_up_decay_lr,
    "WarmupCosineLR": _warm_up_cosine_lr,
}
