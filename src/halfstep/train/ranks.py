"""What the ranks of a run exchange outside the Engine: the request to stop, sums, and what only rank 0 does.

These messages use a gloo group of their own, so that they neither wait for the device nor mix with the gradients'. Every
rank must call the same methods in the same order. With one process each of them returns its argument.

Whether to stop is asked after every step, without waiting: the answer to the question of one step is read after the next,
on all ranks alike, so a signal that reached one rank, or all of them at different moments, ends all ranks after the same
step.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.backends.context import RunContext
from halfstep.backends.messages import gather_into, messages_of
from halfstep.errors import HalfstepError
from halfstep.events import log_info
from halfstep.train.stop import StopRequest

__all__ = ["AgreedStop", "Ranks", "describe_ranks"]

T = TypeVar("T")


class Ranks:
    """The ranks of one run, as seen by one of them."""

    def __init__(self, context: RunContext | None = None, *, timeout_seconds: float = 600) -> None:
        context = context or RunContext()
        self.rank, self.num_ranks = context.rank, context.world_size
        self._group, self._device = context.process_group, context.device
        self._messages = messages_of(context, timedelta(seconds=timeout_seconds))
        self._control: Any = None if self._messages is None else self._messages.group

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files of the run."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self.num_ranks > 1

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        return [value] if self._messages is None else self._messages.gather(value)

    def from_main(self, value: T) -> T:
        """Rank 0's value."""
        received: T = value if self._messages is None else self._messages.broadcast(value, 0)
        return received

    def on_main(self, work: Callable[[], T]) -> T:
        """The result of `work` on rank 0; an error there is raised on every rank."""
        if not self.several:
            return work()
        result: Any = None
        error: Exception | None = None
        if self.is_main:
            try:
                result = work()
            except Exception as raised:
                error = raised
        result, reason = self.from_main((result, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        if reason is not None:
            raise HalfstepError(f"Rank 0 failed, and so the run: {reason}")
        returned: T = result
        return returned

    def sums(self, *values: float) -> list[float]:
        """The sums of numbers of the host over all ranks, in float64."""
        return self._reduced(list(values), dist.ReduceOp.SUM) if self.several else list(values)

    def largest(self, value: float) -> float:
        """The largest value of all ranks."""
        return self._reduced([value], dist.ReduceOp.MAX)[0] if self.several else value

    def _reduced(self, values: list[float], operation: Any) -> list[float]:
        message = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(message, operation, group=self._control)
        numbers: list[float] = message.tolist()
        return numbers

    def mean_loss(self, loss: Tensor, weight: float) -> Tensor:
        """The weighted mean over ranks, and the first rank whose loss is not finite, or -1; the host does not wait for them."""
        if not self.several:
            return torch.stack((loss.detach().float(), loss.new_full((), -1.0, dtype=torch.float32)))
        own = torch.stack((loss.detach().float(), loss.new_full((), weight, dtype=torch.float32)))
        message = own.new_empty(self.num_ranks, 2)
        gather_into(message, own[None], self._group)
        losses, weights = message.unbind(1)
        counted = torch.where(weights > 0, losses, 0)  # a rank without examples computes some other batch again
        broken = ~counted.isfinite()
        first = torch.where(broken.any(), broken.float().argmax(), -1)
        return torch.stack(((counted * weights).sum() / weights.sum(), first.float()))

    def start_largest(self, value: int) -> Callable[[], int]:
        """Start to compare a number with those of the other ranks; the result waits for their largest."""
        if not self.several:
            return lambda: value
        message = torch.tensor(value, dtype=torch.int64)
        work = dist.all_reduce(message, dist.ReduceOp.MAX, group=self._control, async_op=True)

        def wait() -> int:
            work.wait()
            return int(message)

        return wait


class AgreedStop:
    """A request to stop that all ranks have agreed on; false until then."""

    def __init__(self, request: StopRequest, ranks: Ranks) -> None:
        self._request, self._ranks = request, ranks
        self._agreed: signal.Signals | None = None
        self._answer: Callable[[], int] | None = None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal; of one process as soon as it has arrived."""
        return self._agreed if self._ranks.several else self._request.signal

    @property
    def requested(self) -> bool:
        """Whether this process received a signal, agreed or not."""
        return bool(self._request)

    def __bool__(self) -> bool:
        return self.signal is not None

    def poll(self) -> None:
        """Read the answer to the last question and ask again; all ranks call it after the same step."""
        if self._ranks.several and self._agreed is None:
            if self._answer is not None:
                self._set(self._answer())
            self._answer = None if self._agreed else self._ranks.start_largest(self._number())

    def settle(self) -> None:
        """Agree now, waiting for the other ranks."""
        if self._ranks.several and self._agreed is None:
            before, self._answer = self._answer, None
            self._set(max(before() if before is not None else 0, int(self._ranks.largest(self._number()))))

    def _number(self) -> int:
        return 0 if self._request.signal is None else int(self._request.signal)

    def _set(self, number: int) -> None:
        self._agreed = signal.Signals(number) if number else None


def describe_ranks(context: RunContext, backend: str) -> dict[str, Any]:
    """The ranks of a run, for its run file; logged where there are several."""
    if context.world_size > 1:
        log_info(
            f"{context.world_size} ranks ({backend}), micro-batch {context.batch_size * context.world_size}: {context.batch_size} "
            "on each."
        )
    return {"backend": backend, "world_size": context.world_size, "batch_per_rank": context.batch_size}
