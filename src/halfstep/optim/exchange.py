"""What an Engine needs to know about an optimizer that exchanges values with the other ranks by itself.

Backends average gradients before every step. An `Exchanging` optimizer wants that in some steps only, and sends what it needs in
the others, so the backend asks it in each window:

    needs_dense_gradients   whether the gradients of the next step must be the mean over ranks; else they stay this rank's own
    rank_states             the state entries that differ between ranks, which a checkpoint stores for each of them
    synchronized            whether the weights are the same on all ranks now
    weights_differ          whether there are times when they are not

The Engine connects it with the ranks of the backend (`join_ranks`), agrees with them on the overflow flag, and disconnects it on close.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from halfstep.errors import SettingError
from halfstep.optim.lean import LeanOptimizer

__all__ = ["Exchanging", "check_exchange", "exchanging_of", "join_ranks"]


class Exchanging(LeanOptimizer):
    """A lean optimizer that reduces over ranks by itself, at least in some steps."""

    rank_states: ClassVar[tuple[str, ...]]
    weights_differ: ClassVar[bool] = False

    @property
    @abstractmethod
    def needs_dense_gradients(self) -> bool:
        """Whether gradients of the next step must be the mean over all ranks; the same answer on every rank."""

    @property
    @abstractmethod
    def synchronized(self) -> bool:
        """Whether all ranks have the same weights now."""

    @property
    @abstractmethod
    def num_ranks(self) -> int:
        """With how many ranks it exchanges values, this one included."""

    @abstractmethod
    def check_place(self, group: Any, compute: str) -> None:
        """Raise for a process group (None: alone) or a format that it cannot train in, before anything is changed."""

    @abstractmethod
    def join(self, group: Any, compute: str) -> contextlib.AbstractContextManager[None]:
        """Exchange values in this process group (None: alone) until the context ends; the caller averages dense gradients."""

    @abstractmethod
    def settings_text(self) -> str:
        """Settings that must be the same on all ranks."""

    @abstractmethod
    def truth_rows(self) -> dict[str, str]:
        """Rows of the truth table."""

    @abstractmethod
    def waived_guarantees(self) -> tuple[str, ...]:
        """Guarantees of the Engine that do not hold with this optimizer."""

    @abstractmethod
    def compressed_sizes(self) -> tuple[int, ...]:
        """The elements of each tensor that is compressed by itself, for `optim.onebit.allreduce`."""


def exchanging_of(optimizers: Sequence[torch.optim.Optimizer]) -> Exchanging | None:
    """The optimizer among these that exchanges values by itself, if there is one."""
    return next((o for o in optimizers if isinstance(o, Exchanging)), None)


def check_exchange(
    optimizers: Sequence[torch.optim.Optimizer],
    compute: str,
    *,
    backend: str,
    sharded: bool,
    num_ranks: int,
    group: Any,  # of the backend; None for one process
    release: bool,
) -> None:
    """Raise where an optimizer that exchanges values by itself cannot be used in an Engine; nothing is changed."""
    optimizer = exchanging_of(optimizers)
    if optimizer is None:
        return
    name = type(optimizer).__name__
    if sharded:
        raise SettingError(
            f"{name} with backend={backend!r}: it compresses whole momenta with an error that each rank keeps for all of them, and this "
            'backend gives each rank a part of the gradients and states. Use backend="ddp", or AdamW here.'
        )
    if release:
        raise SettingError(
            f"{name} exchanges all gradients together and cannot update parameters inside backward; leave out gradient_release."
        )
    if num_ranks > 1 and len(optimizers) > 1:
        others = ", ".join(type(o).__name__ for o in optimizers if o is not optimizer)
        raise SettingError(
            f"{name} next to {others} on {num_ranks} ranks: in its compressed steps no gradients are averaged, and the others would step on "
            "those of one rank. Give all parameters to one optimizer; OneBitAdam trains groups with non_freeze=True densely."
        )
    if num_ranks == 1 and optimizer.num_ranks > 1:
        raise SettingError(
            f"backend={backend!r} trains this process alone, and {name} exchanges values with {optimizer.num_ranks} ranks. Use "
            'backend="ddp".'
        )
    if num_ranks > 1 and not optimizer.synchronized:
        raise SettingError(
            f"{name} is between two synchronizations, when each rank has its own weights, and the Engine starts with those of rank 0. Build "
            "it after a synchronization (optimizer.synchronized), or restore the run with engine.load."
        )
    optimizer.check_place(group, _format(compute))


def join_ranks(
    optimizers: Sequence[torch.optim.Optimizer], compute: str, group: Any, undo: contextlib.ExitStack
) -> None:
    """Connect the optimizers that exchange values with the ranks of a process group, until `undo`."""
    optimizer = exchanging_of(optimizers)
    if optimizer is not None:
        undo.enter_context(optimizer.join(group, _format(compute)))


def _format(compute: str) -> str:
    return "fp32" if compute == "tf32" else compute
