"""One process, one device: every hook does nothing, and the list of hooks is the contract for the others."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from torch import Tensor, nn

__all__ = ["SingleDevice"]


class SingleDevice:
    """The hooks a distributed backend overrides; a subclass shows only what differs."""

    name = "single"
    rank = 0
    world_size = 1

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module behind torch.compile's or DistributedDataParallel's wrapper."""
        while True:
            inner = getattr(model, "_orig_mod", None)
            if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
                inner = model.module
            if inner is None:
                return model
            model = inner

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around the backward of a micro-batch whose gradients need not be reduced yet."""
        quiet = getattr(model, "no_sync", None)
        return quiet() if callable(quiet) else contextlib.nullcontext()

    def agree(self, found_inf: Tensor) -> Tensor:
        """The flag, the same on every rank: 1 if any rank saw a non-finite gradient."""
        return found_inf

    def reduce_dtype(self) -> str | None:
        """The dtype in which gradients are summed over ranks, if they are."""
        return None

    def close(self) -> None:
        """Give back what the backend holds."""
