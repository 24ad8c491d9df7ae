"""Which rank's own gradients were not finite, under FSDP2.

A reduce-scatter adds up the gradients of all ranks, and afterwards the shard that owns an element has the inf, whichever
rank computed it. So the input of the reduction is looked at, before it is sent, while somebody asks for it: one more read of
the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.backends.fsdp.groups import Groups

__all__ = ["OverflowLook"]


class OverflowLook:
    """Looks at what this rank sends; `found_inf` is 1 if any of it was not finite, until `reset`."""

    def __init__(self) -> None:
        self.enabled = False
        self.found_inf: Tensor | None = None

    def install(self, groups: Groups) -> None:
        """Look at the reductions of these groups; one whose messages the user has customised is left alone."""
        for unit in groups.units:
            comm = unit.group._reduce_scatter_comm  # noqa: SLF001 - as its public setter does
            if type(comm).__name__ in {"DefaultReduceScatter", "_NarrowReduceScatter"}:
                unit.group._reduce_scatter_comm = _looking(comm, self)  # noqa: SLF001

    @torch.no_grad()
    def look(self, tensor: Tensor) -> None:
        """Note whether a message is finite."""
        if not self.enabled or not tensor.numel():
            return
        found_inf = (~torch.linalg.vector_norm(tensor, torch.inf).isfinite()).to(torch.float32)
        self.found_inf = found_inf if self.found_inf is None else torch.maximum(self.found_inf, found_inf)

    def flags(self, rank: int, num_ranks: int, device: torch.device) -> Tensor:
        """One number for each rank, to be added up over ranks."""
        flags = torch.zeros(num_ranks, device=device)
        if self.found_inf is not None:
            flags[rank].copy_(self.found_inf)
        return flags

    def reset(self) -> None:
        """The window ended."""
        self.found_inf = None


def _looking(inner: Any, looks: OverflowLook) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    class _LookingReduceScatter(ReduceScatter):
        def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            allocated: Tensor = inner.allocate(size, dtype=dtype, device=device)
            return allocated

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> Any:
            looks.look(input_tensor)
            return inner(output_tensor, input_tensor, group, op, async_op)

    return _LookingReduceScatter()
