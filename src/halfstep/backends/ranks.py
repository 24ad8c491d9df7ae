"""The ranks of a run, for work on the host that they do together: saving and loading checkpoints.

Messages are JSON over a gloo group that nothing else uses, so that a background thread may send them while the training
communicates over its own group. A failure on one rank is an error on all of them: whoever calls `together` or `lead`
continues only if every rank succeeded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from halfstep.errors import HalfstepError
from halfstep.hardware.units import few

__all__ = ["ProcessRanks", "Ranks"]


class Ranks:
    """One process: what several ranks do together, it does alone."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """The JSON value of every rank, in the order of ranks."""
        return [value]

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Do `work` on every rank and return the JSON value that each returned; a failure on any raises on all."""
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # the other ranks wait for the message; it is raised again below
            error = raised
        problem = None if error is None else f"{type(error).__name__}: {error}"
        outcomes = self.gather({"result": result, "problem": problem})
        if error is not None:
            raise error
        problems = [f"rank {rank}: {o['problem']}" for rank, o in enumerate(outcomes) if o["problem"] is not None]
        if problems:
            raise HalfstepError(f"Another rank failed, so this one stopped as well: {few(problems, 3)}")
        return [outcome["result"] for outcome in outcomes]

    def lead(self, work: Callable[[], Any]) -> Any:
        """Do `work` on rank 0 alone and return its JSON value on every rank."""
        return self.together(work if self.rank == 0 else lambda: None)[0]


class ProcessRanks(Ranks):
    """The processes of a torch.distributed group; every rank must call the same methods in the same order."""

    def __init__(self, group: Any = None) -> None:
        self._of = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self._of), dist.get_world_size(self._of)

    @cached_property
    def _group(self) -> Any:
        # Built at the first message, which every rank sends from its main thread.
        members = dist.get_process_group_ranks(self._of)
        return dist.new_group(members, backend="gloo", use_local_synchronization=True)

    def gather(self, value: Any) -> list[Any]:
        """The JSON value of every rank, in the order of ranks."""
        if self.size == 1:
            return [value]
        message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([message.numel()]), group=self._group)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: message.numel()] = message
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(texts, padded, group=self._group)
        except RuntimeError as error:
            raise HalfstepError(
                f"Rank {self.rank} lost contact with the other ranks ({str(error).splitlines()[0]}): one of them ended or hangs. "
                "See the output of each rank for the first error, and continue from the last checkpoint."
            ) from error
        return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(texts, sizes, strict=True)]
