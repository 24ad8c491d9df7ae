"""The ranks of a run, for messages between their hosts: who sends what to whom, and what happens if a rank does not answer.

How it works. Messages are pickled values in CPU tensors, sent through a gloo group that nothing else uses: no GPU waits for
them, and a background thread may send them while the training communicates over its own group. Every rank must call the
same methods in the same order. With one process each method returns the process's own value and sends nothing.

A failure on one rank is an error on all of them: whoever calls `together` or `on_main` continues only if every rank succeeded.
A message that does not arrive (a rank has ended, hangs, or calls something else) is a RankError. It names the ranks that were
waited for: each rank counts its messages in the store of the process group.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.backends.context import RunContext
from halfstep.errors import HalfstepError, RankError, SettingError
from halfstep.events import log_once
from halfstep.hardware.units import few

__all__ = ["ProcessRanks", "Ranks", "ranks_of"]

T = TypeVar("T")
_PATIENCE_SECONDS = 30  # before a rank that waits for a message logs whose it is


class Ranks:
    """One process: what several ranks do together, it does alone."""

    rank = 0
    num_ranks = 1

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files of the run."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self.num_ranks > 1

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in the order of ranks; their tensors arrive on the CPU."""
        return [value]

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of the rank `source`, on every rank; its tensors arrive on the CPU."""
        return value

    def start_largest(self, value: int) -> Callable[[], int]:
        """Start to compare a number with those of the other ranks; the result waits for their largest."""
        return lambda: value

    def sums(self, *values: float) -> list[float]:
        """The sums of numbers over all ranks, in float64."""
        return [sum(each) for each in zip(*self.gather(values), strict=True)]

    def largest(self, value: float) -> float:
        """The largest value of all ranks."""
        return max(self.gather(value))

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank and return what each returned; a failure on any raises on all."""
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # the other ranks wait for the message; it is raised again below
            error = raised
        problem = None if error is None else f"{type(error).__name__}: {error}"
        outcomes: list[Any] = self.gather((result, problem, isinstance(error, SettingError)))
        if error is not None:
            raise error
        problems = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(outcomes) if text is not None]
        if problems:
            kind = SettingError if any(is_setting for *_, is_setting in outcomes) else HalfstepError
            raise kind(
                f"{len(problems)} of {self.num_ranks} ranks failed, so this one stopped as well: {few(problems, 3)}"
            )
        return [result for result, *_ in outcomes]

    def on_main(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 alone and return its value on every rank."""
        results: list[Any] = self.together(work if self.is_main else lambda: None)
        value: T = results[0]
        return value


class ProcessRanks(Ranks):
    """The processes of a torch.distributed group, by default of all.

    With `device`, messages travel through the group itself, as tensors on that device: for a few of them at the start of a run,
    before there is any other channel.
    """

    def __init__(
        self, group: Any = None, *, timeout: timedelta | None = None, device: torch.device | None = None
    ) -> None:
        self._of = dist.group.WORLD if group is None else group
        self.rank, self.num_ranks = dist.get_rank(self._of), dist.get_world_size(self._of)
        self._timeout, self._own_device = timeout, device
        self._device = device or torch.device("cpu")
        self._num_messages = 0

    @cached_property
    def _group(self) -> Any:
        if self._own_device is not None:
            return self._of
        # Built at the first message, which every rank sends from its main thread.
        members = dist.get_process_group_ranks(self._of)
        timeout = self._timeout or _timeout_of(self._of)
        return dist.new_group(members, backend="gloo", timeout=timeout, use_local_synchronization=True)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in the order of ranks; their tensors arrive on the CPU."""
        if self.num_ranks == 1:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(_on_host(value))), dtype=torch.uint8).to(self._device)
        with self._message():
            own = torch.tensor([data.numel()], device=self._device)
            sizes = [torch.empty_like(own) for _ in range(self.num_ranks)]
            dist.all_gather(sizes, own, group=self._group)
            longest = max(map(int, sizes))
            padded = torch.cat([data, data.new_zeros(longest - data.numel())])
            received = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(received, padded, group=self._group)
        parts = (each[: int(size)].cpu() for each, size in zip(received, sizes, strict=True))
        return [pickle.loads(part.numpy().tobytes()) for part in parts]  # noqa: S301 - from ranks of the same run

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of the rank `source`, on every rank; its tensors arrive on the CPU."""
        values = [_on_host(value) if self.rank == source else None]
        with self._message():
            dist.broadcast_object_list(values, group=self._group, group_src=source, device=self._device)
        received: Any = values[0]
        return received  # type: ignore[no-any-return]

    def start_largest(self, value: int) -> Callable[[], int]:
        """Start to compare a number with those of the other ranks; the result waits for their largest."""
        message = torch.tensor(value, dtype=torch.int64, device=self._device)
        work = dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> int:
            work.wait()
            return int(message)

        return wait

    @cached_property
    def _counts(self) -> Any:
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - it has no public name
        return dist.PrefixStore(f"halfstep/messages/{self._group.group_name}", store)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def _message(self) -> Iterator[None]:
        """A block that sends one message; an error of torch.distributed becomes one that names the ranks to blame."""
        self._num_messages += 1
        timer = threading.Timer(_PATIENCE_SECONDS, self._report_waiting)
        timer.daemon = True
        timer.start()
        try:
            self._counts.set(str(self.rank), str(self._num_messages))
            yield
        except RuntimeError as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RankError(
                f"Rank {self.rank} of {self.num_ranks} lost contact with the other ranks. {self._missing()} Every rank must make the same "
                f"calls, Engine.save and Engine.load included. See the output of each rank for the first error, and continue from the last "
                f"checkpoint. ({first_line})"
            ) from error
        finally:
            timer.cancel()

    def _report_waiting(self) -> None:
        """Name the ranks that are waited for, once; called in a thread of its own."""
        with contextlib.suppress(RuntimeError):  # the message itself reports a store that has gone
            behind = self._behind()
            if behind:
                log_once(
                    f"Rank {self.rank} of {self.num_ranks} has waited {_PATIENCE_SECONDS} s for rank {few(behind)}. If that rank never makes the "
                    "same call, this one ends with an error after the group's timeout: Engine.save and Engine.load are called on every rank."
                )

    def _behind(self) -> list[str]:
        """The ranks that have not sent this message."""
        counts = {
            rank: int(self._counts.get(str(rank))) if self._counts.check([str(rank)]) else 0
            for rank in range(self.num_ranks)
        }
        return [str(rank) for rank, count in counts.items() if count < self._num_messages]

    def _missing(self) -> str:
        try:
            behind = self._behind()
        except RuntimeError:
            return "The store of the process group does not answer: rank 0's process or the launcher has ended."
        if behind:
            return f"Rank {few(behind)} did not send its part: it has ended, hangs or does something else."
        return "All of them had sent their part, and one has ended since then."


def _timeout_of(group: Any) -> timedelta | None:
    """The timeout of a group, for the one of its messages: torch's default is 30 minutes whatever the run has set."""
    for kind in ("cpu", "cuda", "xpu"):
        with contextlib.suppress(RuntimeError, AttributeError):
            timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout  # noqa: SLF001 - it has no public name
            return timeout
    return None


def _on_host(value: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, value)


def ranks_of(run: RunContext, timeout_seconds: float | None = None) -> Ranks:
    """The ranks of a run, one channel for all callers; the first call for a run sets its timeout."""
    if run.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    group = run.process_group or dist.group.WORLD
    if group not in _opened:
        timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        _opened[group] = ProcessRanks(group, timeout=timeout)
    return _opened[group]


_opened: dict[Any, ProcessRanks] = {}  # by the run's own group
