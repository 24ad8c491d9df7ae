"""An fp32 image that first layers of a lean model read, rounded once and before it is copied.

Networks whose first block has parallel branches (FastViT, MobileOne, RepVGG) pass the image to several convolutions. Autocast
rounds it for each, and autograd saves every copy until the backward pass; a pure 16-bit model has one 16-bit image. Here the
second convolution gets the first one's copy. The layers are recognised by their few input channels: images, spectrograms and
latents are what is fp32 in a lean region, and a hook on every convolution would cost more than it saves. A model with one such
layer gets no hook.

`nn.Unfold` cuts an image into overlapping patches, several times its size, and the layer after it rounds them. Rounding before
gives the same patches in half the bytes (of a step of TNT on an H200, 203 ms, unfolding took 15.1; in the pure model 10.2).
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.engine.region.rule import Rule, cast_once, current_rule
from halfstep.precision.formats import DTYPES_16_BIT
from halfstep.precision.policy import Policy

__all__ = ["round_inputs_once"]

_CHANNELS = 4  # of an image with transparency, or of a latent


def round_inputs_once(model: nn.Module, policy: Policy, undo: contextlib.ExitStack) -> None:
    """Let first layers share the 16-bit copy of an input that they have in common; `undo` removes the hooks."""
    first = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.conv._ConvNd)  # noqa: SLF001 - the public classes' common base
        and module.in_channels <= _CHANNELS
        and not policy.computes_fp32(name)
    ]
    unfolds = [m for name, m in model.named_modules() if isinstance(m, nn.Unfold) and not policy.computes_fp32(name)]
    for module in (*(first if len(first) > 1 else ()), *unfolds):
        undo.callback(module.register_forward_pre_hook(_round_once).remove)


class _Identity:
    """A key for a tensor that exists; what is allocated in its place later is not equal to it."""

    def __init__(self, x: Tensor) -> None:
        self._x, self._id = weakref.ref(x), id(x)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        x = self._x()
        return x is not None and isinstance(other, _Identity) and other._x() is x


def _round_once(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if torch.compiler.is_compiling() or current_rule() is not Rule.LEAN or not args:
        return None  # compiled code has no copies: casts are part of the kernels that read them
    x = args[0]
    if not isinstance(x, Tensor) or x.dtype is not torch.float32 or x.requires_grad or x.is_inference():
        return None
    device_type = x.device.type
    dtype = torch.get_autocast_dtype(device_type)
    weight = getattr(module, "weight", None)
    if not torch.is_autocast_enabled(device_type) or (weight is not None and weight.dtype not in DTYPES_16_BIT):
        return None  # inside a module that computes in fp32
    return (cast_once((_Identity(x), x._version, dtype), lambda: x.to(dtype)), *args[1:])  # noqa: SLF001
