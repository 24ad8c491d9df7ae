"""The compressed optimizers in an Engine: connected with its ranks, with rows of its truth table and sizes for the planner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch.distributed as dist

from halfstep.errors import SettingError
from halfstep.hardware.units import bytes_text
from halfstep.optim.exchange import Exchanging
from halfstep.optim.onebit.allreduce import compressed_bytes
from halfstep.optim.onebit.precision import unverified_precision
from halfstep.optim.onebit.schedule import FreezePolicy, FreezeSchedule, ZeroOnePolicy, ZeroOneSchedule
from halfstep.optim.onebit.wire import Wire, dense_bytes

__all__ = ["JoinedOptimizer"]

_WAIVED = (
    "{title}: after the freeze gradients are clipped by the norm of this rank's own, and that norm is reported; the mean over ranks is "
    "never formed"
)


class JoinedOptimizer(Exchanging):
    """What an Engine calls; the attributes are those of `OneBitOptimizer`."""

    one_scale: ClassVar[bool] = False  # whether all tensors are compressed as one
    title: ClassVar[str]
    schedule: FreezeSchedule | ZeroOneSchedule
    policy: FreezePolicy | ZeroOnePolicy
    process_group: Any
    local_gradients: bool
    compute: str | None
    allow_unverified: bool
    deepspeed_compat: bool
    unverified: str | None
    _wire: Wire | None

    @property
    def wire(self) -> Wire:
        """The messages to the other ranks, with the count of sent bytes; connected at the first use."""
        if self._wire is None:
            self._wire = Wire(self.process_group)
        return self._wire

    @property
    def num_ranks(self) -> int:
        """With how many ranks it exchanges values, this one included."""
        return self.wire.num_ranks

    def settle(self) -> None:
        """Bring the schedule up to date with the steps whose flag has been computed."""
        raise NotImplementedError

    def check_place(self, group: Any, compute: str) -> None:
        """Raise where convergence is not verified, and for another process group or `compute` than the Engine's."""
        if group is not None and self.process_group is not None:
            own, others = dist.get_process_group_ranks(self.process_group), dist.get_process_group_ranks(group)
            if own != others:
                raise SettingError(
                    f"{type(self).__name__} has a process_group with the ranks {own}, and the Engine trains on {others}. Leave "
                    "process_group out."
                )
        if self.compute not in {None, compute}:
            raise SettingError(
                f"{type(self).__name__}(compute={self.compute!r}), and the Engine computes in {compute}. Leave compute out: the Engine sets it."
            )
        params = [p for group in self.param_groups for p in group["params"]]
        unverified_precision(params, compute, type(self).__name__, allowed=self.allow_unverified)

    @contextlib.contextmanager
    def join(self, group: Any, compute: str) -> Iterator[None]:
        """Exchange values in this process group until the context ends; the caller averages dense gradients and agrees on the flag."""
        before = (self.process_group, self.local_gradients, self.compute)
        if group is not None:
            self.process_group, self.local_gradients, self._wire = group, False, None
        self.compute = compute
        try:
            yield
        finally:
            self.process_group, self.local_gradients, self.compute = before

    def settings_text(self) -> str:
        """The schedule, on which all ranks must agree."""
        return f"{self.policy}, {self.schedule}, deepspeed_compat={self.deepspeed_compat}"

    def truth_rows(self) -> dict[str, str]:
        """Rows for the truth table: how gradients are reduced, and whether that is verified here."""
        self.settle()
        stage = f"compressed since step {self.schedule.frozen_at}" if self.schedule.frozen else "dense so far"
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        rows = {"communication": f"{self.title} on {ranks}, {stage}; {self.wire.sent_bytes:,} bytes sent by this rank"}
        if self.num_ranks > 1:
            sizes = self.compressed_sizes()
            dense, compressed = dense_bytes(4 * sum(sizes), self.num_ranks), compressed_bytes(sizes, self.num_ranks)
            rows["wire bytes"] = (
                f"{bytes_text(dense)} in a dense step (fp32), {bytes_text(compressed)} in a compressed one"
            )
            rows["clipping norm"] = "that of the mean over ranks in dense steps, of this rank's gradients in all others"
            if self.weights_differ:
                now = "are" if self.synchronized else "are not"
                rows["weights over ranks"] = (
                    f"{now} the same on all ranks now; each rank has its own between two synchronizations, and evaluates them"
                )
            rows["compression errors"] = (
                f"{bytes_text(self._error_bytes())} on this rank (4 + 4 / {self.num_ranks} bytes per compressed parameter)"
            )
        return rows | ({"unverified": self.unverified} if self.unverified else {})

    def waived_guarantees(self) -> tuple[str, ...]:
        """Clipping after the freeze is local."""
        return (_WAIVED.format(title=self.title),) if self.num_ranks > 1 else ()

    def planned_moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Those of the compressed stage, which has the most."""
        return self.moments[:2] if group.get("non_freeze") else self.moments

    def compressed_sizes(self) -> tuple[int, ...]:
        """The elements of each tensor that has a scale of its own."""
        groups = [group for group in self.param_groups if not group.get("non_freeze")]
        sizes = tuple(p.numel() for group in groups for p in group["params"] if p.requires_grad)
        return (sum(sizes),) if self.one_scale else sizes

    def _error_bytes(self) -> int:
        errors = (state.get(name) for state in self.state.values() for name in ("worker_error", "server_error"))
        return sum(error.nbytes for error in errors if error is not None)
