"""A model that the user wrapped in DistributedDataParallel: it reduces the gradients itself.

The wrapper decides in its forward whether the following backward reduces, so `no_sync` is entered around the forward, as
its documentation shows. Weights must stay fp32: its buckets have the dtype that the weights had when it was built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn

from halfstep.backends.base import Backend
from halfstep.backends.context import RunContext
from halfstep.errors import SettingError
from halfstep.precision.policy import Policy

__all__ = ["WrappedDDP", "find_ddp"]


class WrappedDDP(Backend):
    """Hooks around a DistributedDataParallel that is already there."""

    name = "ddp"

    def __init__(self) -> None:
        if dist.is_available() and dist.is_initialized():
            super().__init__(RunContext(rank=dist.get_rank(), world_size=dist.get_world_size()))
        else:
            super().__init__()
        self._wrapper: nn.parallel.DistributedDataParallel | None = None

    def check(self, model: nn.Module, policy: Policy) -> None:
        """Reject policies that the wrapper's fp32 buckets cannot carry."""
        if policy.params != "fp32":
            raise SettingError(
                f"The model is in DistributedDataParallel, whose buckets have the dtype the weights had when it was built; {policy} "
                "casts the weights, and the ranks would silently drift apart. Use a preset with fp32 weights, such as bf16 or fp16."
            )
        if policy.reduce != "fp32":
            raise SettingError(
                f"reduce={policy.reduce} would have no effect: DistributedDataParallel sums the gradients of fp32 weights in fp32. "
                "Omit it, and register one of DistributedDataParallel's communication hooks on the model."
            )

    def prepare(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
        """Remember the wrapper and return the module inside it."""
        self._wrapper = find_ddp(model)
        return super().prepare(model, optimizers)

    def forward_context(self, *, last: bool) -> AbstractContextManager[None]:
        """`no_sync` for all but the last micro-batch of a window."""
        return contextlib.nullcontext() if last or self._wrapper is None else self._wrapper.no_sync()

    def truth_rows(self) -> Mapping[str, str]:
        """The wrapper sums fp32 gradients in fp32."""
        return {"reduction": "fp32 over ranks"}


def find_ddp(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel around a model, below torch.compile's wrapper or above it."""
    while not isinstance(model, nn.parallel.DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            return None
        model = inner
    return model
