"""The base of all Halfstep loaders: a computable order of examples, and a position to resume from.

How it works. The order of an epoch is a function of (seed, epoch) alone: no global random state, no history, no ranks. It
is cut into global batches of G = batch_size * world_size examples, and each global batch into `world_size` contiguous
slices whose sizes differ by at most one, the larger ones first. Rank r takes slice r: rows r * batch_size to
(r + 1) * batch_size of a full global batch. So W ranks with batch_size b train on the batches of one process with batch_size W * b.

The position is the epoch and the number of its examples that all ranks together have used. It is the same on every rank, and
valid for any number of ranks and any batch_size: the rest of the order is cut into global batches of the new size, so no
example is lost or repeated. The rest of the epoch is computed, not replayed.

Training: shuffled in each epoch; a short last global batch is dropped, so every step has the same number of examples on every
rank. With drop_last=False it is kept, and a rank for which it has no example has one batch less; `train.shares` makes the ranks
take the same number of steps. Validation: file order, every example exactly once; the last batch may be short.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import SettingError, unknown
from halfstep.jobs.job import SPLITS

__all__ = ["Batch", "Loader", "Order", "OrderedLoader", "mix"]

Batch = tuple[Tensor, Tensor]
AnyBatch = Batch | dict[str, Tensor]
STATE_VERSION = 2


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
    drop_last: bool = True  # a short last global batch of the training split

    def __post_init__(self) -> None:
        check_settings(self.split, self.batch_size, self.rank, self.world_size)
        needed = self.global_batch if self._drops else self.world_size
        if self.num_examples < needed:
            raise SettingError(
                f"The {self.split} split has {self.num_examples} examples, too few for one batch in every process: "
                f"batch_size={self.batch_size} with {self.world_size} process(es) needs {needed}. Lower batch_size (--batch)."
            )

    @property
    def global_batch(self) -> int:
        """Examples per batch of all processes together."""
        return self.batch_size * self.world_size

    @property
    def _drops(self) -> bool:
        return self.drop_last and self.split == "train"

    @property
    def num_batches(self) -> int:
        """Batches per epoch in this process."""
        return len(self.batches(0))

    def global_sizes(self, start: int = 0) -> list[int]:
        """The sizes of the epoch's global batches, if the first `start` examples were used before the rest was cut."""
        used, rest = divmod(start, self.global_batch)
        sizes = [self.global_batch] * used + [rest] * (rest > 0)
        full, tail = divmod(self.num_examples - start, self.global_batch)
        sizes += [self.global_batch] * full
        if tail == 0 or self._drops:
            return sizes
        if self.split != "train" and tail < self.world_size and full:
            # Too few for every process to get one, and under FSDP a process without a batch makes the others wait
            # for ever: distribute the last two batches evenly.
            both = sizes.pop() + tail
            return [*sizes, both - both // 2, both // 2]
        return [*sizes, tail]

    def batches(self, epoch: int, start: int = 0) -> list[Tensor]:
        """The example indices of each batch of the epoch, in order; `start` as for `global_sizes`."""
        order = torch.arange(self.num_examples)
        if self.split == "train":
            generator = torch.Generator().manual_seed(mix("order", self.seed, epoch))
            order = torch.randperm(self.num_examples, generator=generator)
        sizes = self.global_sizes(start)
        chunks = torch.split(order[: sum(sizes)], sizes)
        local = [chunk.tensor_split(self.world_size)[self.rank] for chunk in chunks]
        while local and not len(local[-1]):  # a tail of fewer examples than processes
            local.pop()
        return local


class Loader(ABC):
    """An iterable of batches with a position: `state_dict()`, `load_state_dict()`, `set_epoch()`.

    Iterating yields the current epoch from its start, or from the loaded position, and then advances to the next
    epoch. The position counts the batches that were returned, not those prefetched.
    """

    shares_position = True  # a position that one rank saved is valid on all of them

    def __init__(self, identity: Mapping[str, int | str], num_batches: int | None, epoch: int = 0) -> None:
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

    @property
    def batch(self) -> int:
        """The number of batches of the epoch that were returned."""
        return self._batch

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError(f"{type(self).__name__} has no length: the number of its examples is not known in advance.")
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
        self._check_identity(state)
        epoch, batch = state.get("epoch"), state.get("batch")
        most = self._num_batches
        if not isinstance(epoch, int) or not isinstance(batch, int) or min(epoch, batch) < 0 or (most and batch > most):
            raise _outside(epoch, f"batch={batch!r}", f"{self._num_batches} batches")
        self._epoch, self._batch, self._first = epoch, batch, batch

    def _check_identity(self, state: Mapping[str, Any]) -> None:
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


class OrderedLoader(Loader):
    """A loader of stored examples in the order of an `Order`; its position counts the examples that all ranks have used."""

    def __init__(self, order: Order, identity: Mapping[str, int | str], epoch: int = 0) -> None:
        self._order = order
        self._start = (epoch, 0)  # an epoch, and the examples of it that were used before its batches were cut
        own: dict[str, int | str] = {"num_examples": order.num_examples, "split": order.split, "seed": order.seed}
        super().__init__({**own, **identity}, order.num_batches, epoch)

    def _start_of(self, epoch: int) -> int:
        return self._start[1] if self._start[0] == epoch else 0

    def _rows(self, epoch: int) -> list[Tensor]:
        """The example indices of this rank's batches of an epoch."""
        return self._order.batches(epoch, self._start_of(epoch))

    def __len__(self) -> int:
        return len(self._rows(self._epoch)) if self._start_of(self._epoch) else super().__len__()

    def sample_indices(self, epoch: int, batch: int) -> list[int]:
        """The examples that a batch consists of, by their index in the split."""
        indices: list[int] = self._rows(epoch)[batch].tolist()
        return indices

    def state_dict(self) -> dict[str, Any]:
        """The position and the data for which it is valid, as plain values; the same on every rank."""
        examples = sum(self._order.global_sizes(self._start_of(self._epoch))[: self._batch])
        return {"version": STATE_VERSION, "epoch": self._epoch, "examples": examples, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the examples that would have followed, with any number of ranks and any batch size."""
        self._check_identity(state)
        epoch, examples = state.get("epoch"), state.get("examples")
        most = self._order.num_examples
        if not isinstance(epoch, int) or not isinstance(examples, int) or epoch < 0 or not 0 <= examples <= most:
            raise _outside(epoch, f"examples={examples!r}", f"{most} examples")
        # Where the position is between two batches of the whole epoch, the batches keep their numbers.
        bounds = list(itertools.accumulate(self._order.global_sizes(), initial=0))
        self._start = (epoch, 0 if examples in bounds else examples)
        if self._start[1]:
            bounds = list(itertools.accumulate(self._order.global_sizes(examples), initial=0))
        batch = bounds.index(examples)
        self._epoch, self._batch, self._first = epoch, batch, batch


def _outside(epoch: Any, place: str, size: str) -> SettingError:
    return SettingError(
        f"The data position epoch={epoch!r}, {place} is outside this data, which has {size} per epoch; "
        "the checkpoint was saved with other data."
    )


def check_settings(split: str, batch_size: int, rank: int, world_size: int) -> None:
    """Raise for an unknown split or an impossible batch size or rank."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if batch_size < 1:
        raise SettingError(f"batch_size={batch_size} must be at least 1.")
    if not 0 <= rank < world_size:
        raise SettingError(f"rank={rank} must be between 0 and world_size - 1 = {world_size - 1}.")
