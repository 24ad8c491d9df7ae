"""Faults of DeepSpeed that apply to an engine, read from its objects. The ids are those of docs/deepspeed.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfstep.backends.deepspeed.rows import accumulation_of

__all__ = ["engine_faults"]


def engine_faults(engine: Any) -> tuple[str, ...]:
    """The faults of DeepSpeed 0.19.8 that this engine has."""
    return tuple(f"{number}: {text}" for number, (applies, text) in _FAULTS.items() if applies(engine))


def _stage(engine: Any) -> int:
    return int(engine.zero_optimization_stage())


def _is_16_bit(engine: Any) -> bool:
    return bool(engine.fp16_enabled() or engine.bfloat16_enabled())


def _fp16_autocast_with_zero(engine: Any) -> bool:
    return (
        bool(engine.torch_autocast_enabled()) and engine.torch_autocast_dtype() is torch.float16 and _stage(engine) > 0
    )


_FAULTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "D08": (
        lambda e: e.fp16_enabled() and _stage(e) == 0 and e.dynamic_loss_scale(),
        "hysteresis is ignored without ZeRO; the scale halves at every overflow",
    ),
    "D11": (
        lambda e: e.fp16_enabled() and _stage(e) == 0,
        "without ZeRO the loss is not scaled, but gradients are divided by the scale (0.18.3 and later)",
    ),
    "D12": (
        lambda e: e.fp16_enabled() and e.dynamic_loss_scale(),
        "on the step on which the loss scale grows, the gradient is halved",
    ),
    "D16": (
        lambda e: _is_16_bit(e) and _stage(e) == 0,
        "the optimizer took one step with zero gradients while it was built: weight decay, and a step count of 1",
    ),
    "D25": (
        lambda e: not _is_16_bit(e) and _stage(e) == 0,
        "a NaN gradient is applied to the weights",
    ),
    "D36": (
        lambda e: _is_16_bit(e) and accumulation_of(e) != "fp32" and e.gradient_accumulation_steps() > 1,
        "gradients are added up in 16 bits and stagnate; set data_types.grad_accum_dtype",
    ),
    "D40": (
        lambda e: _is_16_bit(e) and e.communication_data_type is not torch.float32,
        "gradients are reduced in 16 bits; set communication_data_type",
    ),
    "D62": (
        lambda e: _fp16_autocast_with_zero(e) and e.gradient_clipping() > 0,
        "gradients are clipped while they are still multiplied by the loss scale",
    ),
    "D63": (_fp16_autocast_with_zero, "after one overflow every later step is skipped (0.19.8)"),
    "D65": (_fp16_autocast_with_zero, "the loss scale is not saved in checkpoints"),
}
