"""What every loader of Halfstep shares: an order of examples that can be computed, and a position to resume at.

How it works. The order of an epoch is a function of (seed, epoch) alone: no global random state, no history. So
every precision under comparison sees the same batches, and resuming needs two numbers, the epoch and how many of
its batches were handed out; the rest of the epoch is computed again, not replayed.

Train: shuffled anew each epoch; a last short batch is dropped, so that every step has the same number of examples
on every process. Val: file order, every example exactly once; the last batch may be short. One batch on each of W
processes holds together what one process with a W times larger batch_size would see.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import SettingError, unknown
from halfstep.jobs.job import SPLITS

__all__ = ["Batch", "Loader", "Order", "mix"]

Batch = tuple[Tensor, Tensor]
STATE_VERSION = 1


def mix(*parts: int | str) -> int:
    """One seed out of several numbers, the same on every machine and unrelated for neighbouring inputs."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Order:
    """Which examples go into which batch, on one process of `world_size`."""

    num_examples: int
    batch_size: int
    split: str
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        check_place(self.split, self.batch_size, self.rank, self.world_size)
        together = self.batch_size * self.world_size
        needed = together if self.split == "train" else self.world_size
        if self.num_examples < needed:
            raise SettingError(
                f"The {self.split} split has {self.num_examples} examples, fewer than one batch on every process needs: "
                f"batch_size={self.batch_size} on {self.world_size} process(es) needs {needed}. Lower batch_size."
            )

    @property
    def num_batches(self) -> int:
        """Batches in an epoch on this process."""
        return len(self._chunks(torch.arange(self.num_examples)))

    def batches(self, epoch: int) -> list[Tensor]:
        """The example numbers of each batch of the epoch, in order."""
        if self.split != "train":
            return self._chunks(torch.arange(self.num_examples))
        generator = torch.Generator().manual_seed(mix("order", self.seed, epoch))
        return self._chunks(torch.randperm(self.num_examples, generator=generator))

    def _chunks(self, order: Tensor) -> list[Tensor]:
        """This process's part of each batch."""
        together = self.batch_size * self.world_size
        chunks = list(torch.split(order, together))
        tail = len(chunks[-1])
        if self.split == "train":
            chunks = chunks if tail == together else chunks[:-1]
        elif tail < self.world_size and len(chunks) > 1:
            # Too few for every process to get one, and under FSDP a process without a batch makes the others wait
            # for ever: share the last two batches out evenly.
            chunks[-2:] = torch.cat(chunks[-2:]).tensor_split(2)
        own = [chunk.tensor_split(self.world_size)[self.rank] for chunk in chunks]
        return [chunk for chunk in own if len(chunk)]  # empty only for batch_size=1, where nothing can be shared out


class Loader(ABC):
    """An iterable of batches with a position: `state_dict()`, `load_state_dict()`, `set_epoch()`.

    Iterating goes through the current epoch from its start, or from the position that was loaded, and then moves
    on to the next epoch. The position counts the batches handed out, not those prepared ahead.
    """

    def __init__(self, identity: Mapping[str, int | str], num_batches: int, epoch: int = 0) -> None:
        self._identity = {"loader": type(self).__name__, **identity}
        self._num_batches = num_batches
        self._epoch = epoch
        self._batch = 0
        self._first = 0

    @abstractmethod
    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        """The batches of an epoch, from number `first` on."""

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or that comes next."""
        return self._epoch

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        first, self._first = self._first, 0
        self._batch = first
        return self._advance(self._epoch, first)

    def _advance(self, epoch: int, first: int) -> Iterator[Batch]:
        for number, batch in enumerate(self._batches(epoch, first), first + 1):
            self._batch = number
            yield batch
        self._epoch, self._batch = epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; naming the current epoch keeps a position that was just loaded."""
        if epoch != self._epoch:
            self._epoch, self._batch, self._first = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The position, and what must be the same for it to mean anything, as plain values."""
        return {"version": STATE_VERSION, "epoch": self._epoch, "batch": self._batch, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the batches that would have followed when `state` was taken."""
        if state.get("version") != STATE_VERSION:
            raise SettingError(
                f"The data position has version {state.get('version')!r}; this Halfstep reads version {STATE_VERSION}."
            )
        for key, mine in self._identity.items():
            if state.get(key) != mine:
                raise SettingError(
                    f"The data position was saved with {key}={state.get(key)!r}, but here {key} is {mine!r}, so other batches "
                    "would follow. Resume with the same setting, or start the data from the beginning."
                )
        epoch, batch = state.get("epoch"), state.get("batch")
        if not isinstance(epoch, int) or not isinstance(batch, int) or epoch < 0 or not 0 <= batch <= self._num_batches:
            raise SettingError(
                f"The data position epoch={epoch!r}, batch={batch!r} is outside this data, which has {self._num_batches} batches an epoch."
            )
        self._epoch, self._batch, self._first = epoch, batch, batch


def check_place(split: str, batch_size: int, rank: int, world_size: int) -> None:
    """Refuse a split, batch size or rank that cannot be."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if batch_size < 1:
        raise SettingError(f"batch_size={batch_size} must be at least 1.")
    if not 0 <= rank < world_size:
        raise SettingError(f"rank={rank} must be between 0 and world_size - 1 = {world_size - 1}.")


def order_identity(order: Order) -> dict[str, int | str]:
    """What two loaders must share for a position of one to be valid in the other; every rank's position is the same."""
    values = asdict(order)
    del values["rank"]
    return values
