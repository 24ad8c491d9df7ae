"""The base of all Halfstep loaders: a computable order of examples, and a position to resume from.

How it works. The order of an epoch is a function of (seed, epoch) alone: no global random state, no history. So
every precision in a comparison gets the same batches, and resuming needs two numbers, the epoch and how many of its
batches were returned; the rest of the epoch is computed, not replayed.

Training: shuffled in each epoch; a short last batch is dropped, so every step has the same number of examples in
every process. Validation: file order, every example exactly once; the last batch may be short. The batches of W
processes together are the batch of one process with a W times larger batch_size.
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
AnyBatch = Batch | dict[str, Tensor]
STATE_VERSION = 1


def mix(*parts: int | str) -> int:
    """Hash several values into one seed, the same on every machine and unrelated for similar inputs."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Order:
    """The examples in each batch of one process of `world_size`."""

    num_examples: int
    batch_size: int
    split: str
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        check_settings(self.split, self.batch_size, self.rank, self.world_size)
        together = self.batch_size * self.world_size
        needed = together if self.split == "train" else self.world_size
        if self.num_examples < needed:
            raise SettingError(
                f"The {self.split} split has {self.num_examples} examples, too few for one batch in every process: "
                f"batch_size={self.batch_size} with {self.world_size} process(es) needs {needed}. Lower batch_size."
            )

    @property
    def num_batches(self) -> int:
        """Batches per epoch in this process."""
        return len(self._chunks(torch.arange(self.num_examples)))

    def batches(self, epoch: int) -> list[Tensor]:
        """The example indices of each batch of the epoch, in order."""
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
            # for ever: distribute the last two batches evenly.
            chunks[-2:] = torch.cat(chunks[-2:]).tensor_split(2)
        local = [chunk.tensor_split(self.world_size)[self.rank] for chunk in chunks]
        return [chunk for chunk in local if len(chunk)]  # empty only for batch_size=1, which cannot be distributed


class Loader(ABC):
    """An iterable of batches with a position: `state_dict()`, `load_state_dict()`, `set_epoch()`.

    Iterating yields the current epoch from its start, or from the loaded position, and then advances to the next
    epoch. The position counts the batches that were returned, not those prefetched.
    """

    def __init__(self, identity: Mapping[str, int | str], num_batches: int, epoch: int = 0) -> None:
        self._identity = {"loader": type(self).__name__, **identity}
        self._num_batches = num_batches
        self._epoch = epoch
        self._batch = 0
        self._first = 0

    @abstractmethod
    def _batches(self, epoch: int, first: int) -> Iterator[AnyBatch]:
        """The batches of an epoch, starting at index `first`."""

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or the next one."""
        return self._epoch

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[AnyBatch]:
        first, self._first = self._first, 0
        self._batch = first
        return self._advance(self._epoch, first)

    def _advance(self, epoch: int, first: int) -> Iterator[AnyBatch]:
        for number, batch in enumerate(self._batches(epoch, first), first + 1):
            self._batch = number
            yield batch
        self._epoch, self._batch = epoch + 1, 0

    def sample_indices(self, epoch: int, batch: int) -> list[int] | None:
        """The examples that a batch consists of, by their index in the split; None for generated data."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; for the current epoch, a position that was just loaded is kept."""
        if epoch != self._epoch:
            self._epoch, self._batch, self._first = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The position and the settings for which it is valid, as plain values."""
        return {"version": STATE_VERSION, "epoch": self._epoch, "batch": self._batch, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the batches that would have followed when `state` was saved."""
        if state.get("version") != STATE_VERSION:
            raise SettingError(
                f"The data position has version {state.get('version')!r}; this Halfstep reads version {STATE_VERSION}; resume with the Halfstep that saved it."
            )
        for key, current in self._identity.items():
            if state.get(key) != current:
                raise SettingError(
                    f"The data position was saved with {key}={state.get(key)!r}, but {key} is now {current!r}, so other batches "
                    "would follow. Resume with the same setting, or start the data from the beginning."
                )
        epoch, batch = state.get("epoch"), state.get("batch")
        if not isinstance(epoch, int) or not isinstance(batch, int) or epoch < 0 or not 0 <= batch <= self._num_batches:
            raise SettingError(
                f"The data position epoch={epoch!r}, batch={batch!r} is outside this data, which has {self._num_batches} batches per epoch; "
                "the checkpoint was saved with other data."
            )
        self._epoch, self._batch, self._first = epoch, batch, batch


def check_settings(split: str, batch_size: int, rank: int, world_size: int) -> None:
    """Raise for an unknown split or an impossible batch size or rank."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if batch_size < 1:
        raise SettingError(f"batch_size={batch_size} must be at least 1.")
    if not 0 <= rank < world_size:
        raise SettingError(f"rank={rank} must be between 0 and world_size - 1 = {world_size - 1}.")


def order_identity(order: Order) -> dict[str, int | str]:
    """The settings for which a position is valid; rank is not one of them, since all ranks have the same position."""
    values = asdict(order)
    del values["rank"]
    return values
