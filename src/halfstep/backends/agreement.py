"""What the ranks of a run agree on in each window: the unit of its weights, its weight, whether to skip, when to reduce.

Gradients are averaged over ranks, so the weighted mean over all micro-batches of all ranks needs two things:

    before the reduction    one reference on all ranks, the largest of theirs, in which the weights are counted
    at the update           the mean over ranks of the windows' weights, by which the averaged gradients are divided

The second is one message of four numbers per update, and carries the flag of a non-finite gradient as well. The first is
another message, sent only while any rank passes weights: the message of each update includes whether this rank did, the
host reads the sum one window later, and all ranks act on it alike. Until a new weight is known to all, the last reference
stays in use, which is right and at worst overflows fp16 in that window.

The fourth number is whether this rank called backward several times for the micro-batch that filled the window. While no
rank ever did, gradients can be reduced during that backward; afterwards all ranks reduce when the window closes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.scaling.readback import Readback

__all__ = ["Agreement"]


class Agreement:
    """The messages of one rank; every rank must call the same methods in the same order."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device, self._num_ranks = group, device, dist.get_world_size(group)
        self._readback = Readback()
        self._exchanges = True  # references, until all ranks are known to pass no weights
        self._several: bool | None = None  # whether any rank ever had several backwards; None before the first window
        self._common: float | Tensor = 1.0  # the reference of the last reduction
        self._weighted = False  # whether this rank passed weights in this window
        self._broken: Tensor | None = None  # whether this rank's norm is not finite; None once it was sent
        self._skip: Tensor | None = None  # the same of all ranks
        self.sums: Tensor | None = None  # of the numbers that were sent with the last weight

    def reference(self, reference: float | Tensor, *, weighted: bool) -> float | Tensor:
        """The reference of all ranks, from that of this one."""
        self._weighted = self._weighted or weighted
        self._deliver()
        if self._exchanges:
            self._common = self._reduced([reference], dist.ReduceOp.MAX)[0]
        return self._common

    def one_backward(self) -> bool:
        """Whether all ranks are known to call backward once for the micro-batch that fills a window."""
        self._deliver()
        return self._several is False

    def norm(self, norm: Tensor) -> Tensor:
        """Remember whether a norm is finite, for the next message."""
        self._broken, self._skip = (~norm.isfinite()).to(torch.float32), None
        return norm

    def weight(self, weight: float | Tensor, *numbers: Tensor, several: bool = False) -> Tensor:
        """The mean of the windows' weights over ranks; the flag travels with it, and `several` for `one_backward`.

        So do other `numbers`, whose sums over ranks are then in `sums`.
        """
        broken = 0.0 if self._broken is None else self._broken
        values = [weight, broken, float(self._weighted), float(several)]
        message = self._reduced(values, dist.ReduceOp.SUM, *numbers)
        self.sums = message[4:]
        self._skip, self._broken, self._weighted = (message[1] > 0).to(torch.float32), None, False
        self._readback.push(torch.stack((message[2], message[3], self._tensor(self._common))))
        return message[0] / self._num_ranks

    def flag(self, found_inf: Tensor) -> Tensor:
        """The flag, set if it is on any rank."""
        if self._skip is None:  # no weight was reduced since the norm was read: after unscale()
            return self._reduced([found_inf], dist.ReduceOp.MAX)[0].to(found_inf.device)
        skip, self._skip = self._skip.to(found_inf.device), None
        return torch.maximum(found_inf, skip)

    def any_flag(self, found_inf: Tensor) -> Tensor:
        """The same in a message of its own: for gradients that were not reduced, whose norms differ between ranks."""
        skip, self._skip = self._skip, None
        own = found_inf if skip is None else torch.maximum(found_inf, skip.to(found_inf.device))
        return self._reduced([own], dist.ReduceOp.MAX)[0].to(found_inf.device)

    @property
    def broken(self) -> Tensor | None:
        """Whether the last norm of this rank was not finite; None once it was sent."""
        return self._broken

    def reset(self) -> None:
        """Forget a window that ended without an update."""
        self._weighted, self._broken, self._skip = False, None, None

    def _deliver(self) -> None:
        for _, (num_weighted, num_several, common) in self._readback.deliver(wait=True):
            self._exchanges, self._common = num_weighted > 0, common
            self._several = bool(self._several) or num_several > 0

    def _tensor(self, value: float | Tensor) -> Tensor:
        # torch.full and not torch.tensor: a copy from the host would wait for the device.
        if isinstance(value, Tensor):
            return value.detach().to(self._device, torch.float32)
        return torch.full((), value, dtype=torch.float32, device=self._device)

    def _reduced(self, values: list[float | Tensor], operation: Any, *more: Tensor) -> Tensor:
        message = torch.stack([self._tensor(value) for value in values])
        if more:
            message = torch.cat(
                [message, *(each.detach().to(self._device, torch.float32).reshape(-1) for each in more)]
            )
        dist.all_reduce(message, operation, group=self._group)
        return message
