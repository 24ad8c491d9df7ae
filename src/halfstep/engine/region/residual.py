"""residual=fp32: the residual stream of a lean model in fp32.

A network of residual blocks adds the result of each block to a stream that runs from the embedding to the head. torch.amp
often keeps that stream in fp32, because embeddings, positions or norms give fp32; a pure 16-bit model, and a lean one by
default, rounds it after each block, and the errors add up with depth. Here the first tensor that enters a repeated block
(`engine/repeats.py`) is cast to fp32. torch promotes the sums with the block's 16-bit results, so the stream stays fp32 from
there on; norms read it in fp32 and give 16 bits. It costs what fp32 sums cost: bandwidth, and the memory of the saved stream.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.engine.repeats import repeated_blocks
from halfstep.errors import SettingError
from halfstep.precision.formats import DTYPES_16_BIT
from halfstep.precision.policy import Policy

__all__ = ["check_residual", "residual_row", "widen_residual"]


def check_residual(model: nn.Module, policy: Policy) -> None:
    """Raise for residual=fp32 on a model without repeated blocks."""
    if policy.residual == "fp32" and not repeated_blocks(model):
        raise SettingError(
            f"residual=fp32 applies to repeated blocks, and {type(model).__name__} has none: no two children of a module have the same "
            "class and the same parameters. Leave out residual, or keep modules in fp32 by name (keep_fp32=...)."
        )


def widen_residual(model: nn.Module, policy: Policy, undo: contextlib.ExitStack) -> None:
    """Cast what enters each repeated block to fp32, if the policy says so; `undo` removes the hooks."""
    if policy.residual != "fp32":
        return
    for stack in repeated_blocks(model):
        for block in stack.modules:
            undo.callback(block.register_forward_pre_hook(_widen, with_kwargs=True).remove)


def residual_row(model: nn.Module, policy: Policy) -> dict[str, str]:
    """The row of the truth table."""
    if policy.residual != "fp32":
        return {}
    return {"residual stream": f"fp32 in {sum(len(stack.blocks) for stack in repeated_blocks(model))} blocks"}


def _widen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001 - torch's signature
    if not torch.is_autocast_enabled(_device_type(args, kwargs)):  # outside a region weights and inputs must agree
        return None
    for index, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            return ((*args[:index], _wide(value), *args[index + 1 :]), kwargs)
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            return (args, kwargs | {name: _wide(value)})
    return None


def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return next((v.device.type for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), "cpu")


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in DTYPES_16_BIT else x
