"""One process, one device: every hook does nothing, and the list of hooks is the contract for the others."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from torch import Tensor, nn

from halfstep.errors import SettingError
from halfstep.precision.policy import Policy

__all__ = ["SingleDevice"]


class SingleDevice:
    """The hooks a distributed backend overrides; a subclass shows only what differs."""

    name = "single"
    rank = 0
    world_size = 1
    _reduces = False  # whether the model's own wrapper sums gradients over ranks

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module behind torch.compile's or DistributedDataParallel's wrapper."""
        while True:
            inner = getattr(model, "_orig_mod", None)
            if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
                inner, self._reduces = model.module, True
            if inner is None:
                return model
            model = inner

    def check(self, policy: Policy) -> None:
        """Refuse a policy that this backend cannot keep, before anything is changed."""
        if self._reduces and policy.params != "fp32":
            raise SettingError(
                f"The model is in DistributedDataParallel, whose buckets have the dtype the weights had then; {policy} casts the weights, "
                "and the ranks would drift apart unnoticed. Use a preset with fp32 weights, such as bf16 or fp16."
            )
        if self._reduces and policy.reduce != "fp32":
            raise SettingError(
                f"reduce={policy.reduce} would do nothing: DistributedDataParallel sums the gradients of fp32 weights in fp32. Leave it "
                "out, and register one of DistributedDataParallel's own communication hooks on the model."
            )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around the backward of a micro-batch whose gradients need not be reduced yet."""
        quiet = getattr(model, "no_sync", None)
        return quiet() if callable(quiet) else contextlib.nullcontext()

    def agree(self, found_inf: Tensor) -> Tensor:
        """The flag, the same on every rank: 1 if any rank saw a non-finite gradient."""
        return found_inf

    def reduce_dtype(self) -> str | None:
        """The dtype in which gradients are summed over ranks, if they are."""
        return "fp32" if self._reduces else None  # DistributedDataParallel's, of fp32 weights

    def close(self) -> None:
        """Give back what the backend holds."""
