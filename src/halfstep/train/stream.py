"""The data of a run, with a position that can be saved and restored.

A loader with `state_dict` and `load_state_dict` stores its own position. For any other iterable the position is a count:
on resume the random-number generators are set to their state at the start of the epoch, so that the loader shuffles as
it did then, the batches already used are drawn again and dropped, and the generators are set to their state at the
checkpoint. The first batch drawn again is compared with the original one by its fingerprint, so that data which cannot
be repeated is detected instead of being trained on twice.

On several ranks each has its own data and its own position. All ranks return the same number of batches (`train.shares`),
and `share` is what the last one counts. A position saved on another number of ranks is counted in examples of all ranks:
each drops its part of them. That is exact for Halfstep's loaders, and for data that is dealt out in one global order, as
DistributedSampler does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.backends.context import RunContext
from halfstep.backends.ranks import Ranks, ranks_of
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.errors import SettingError
from halfstep.events import log_info
from halfstep.jobs.data.feed import FeedMeter
from halfstep.jobs.data.workers import stop_workers_at_exit
from halfstep.jobs.job import Job, read_arguments
from halfstep.train.distinct import check_distinct, check_sampler, samplers_of
from halfstep.train.order import SampleOrder
from halfstep.train.shares import Share, share_batches

__all__ = ["DataStream", "batch_size_of", "fingerprint", "to_device"]


def fingerprint(batch: Any) -> str:
    """A digest of the tensors and plain values of a batch."""
    digest = hashlib.sha256()
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:  # an address differs from process to process
            digest.update(re.sub(r"\bat 0x[0-9a-f]+", "", repr(leaf)).encode())
    return digest.hexdigest()


def _leaves(batch: Any) -> Iterator[Any]:
    """The leaves of a batch, including the attributes of objects with the default repr."""
    for leaf in pytree.tree_leaves(batch):
        yield leaf
        if getattr(type(leaf), "__repr__", None) is object.__repr__:
            yield from pytree.tree_leaves(getattr(leaf, "__dict__", {}))


@overload
def batch_size_of(batch: Any, default: int) -> int: ...
@overload
def batch_size_of(batch: Any, default: None = None) -> int | None: ...
def batch_size_of(batch: Any, default: int | None = None) -> int | None:
    """The number of examples in a batch: the first dimension of its first tensor, or `default` without one."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    return default


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`."""
    return pytree.tree_map(lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, batch)


class DataStream:
    """The batches of one split, epoch by epoch."""

    def __init__(self, job: Job, run: RunContext, *, split: str) -> None:
        self._job, self._run, self._split = job, run, split
        arguments = read_arguments(job.data)
        # A loader without an `epoch` argument is created once and iterated again, as is usual for DataLoaders.
        self._per_epoch = "epoch" in arguments.names
        self._loader: Any = None
        self._made_for = -1  # the epoch of the loader
        # Validation data may be the same on all ranks, and their numbers of batches may differ.
        self._ranks = ranks_of(run) if split == "train" else Ranks()
        self._is_checked = not self._ranks.several  # that ranks have different data
        self.epoch = self.batch = 0
        self._examples = 0  # of this epoch, used by all ranks
        self.share = Share(0, 0)  # of the last batch
        self.feed = FeedMeter(run.device)
        self._rng: Any = None
        self._first: str | None = None
        self._resume: dict[str, Any] | None = None
        self.order: SampleOrder | None = None  # of the epoch in progress

    def batches(self, epoch: int) -> Iterator[Any]:
        """The batches of `epoch`, from the restored position if it lies in this epoch."""
        self.epoch, self.batch, self._examples = epoch, 0, 0
        with self._job.guard("data"):
            loader = self._make(epoch)
        resumes = self.resumes_in(epoch)
        resume, self._resume = self._resume, None
        if resume is not None and resumes:
            batches = self._replay(loader, resume)
        else:
            self._rng, self._first = rng_state(), None
            self.order = SampleOrder(loader, epoch, self._rng)
            with self._job.guard("data"):
                batches = iter(loader)
        stop_workers_at_exit(loader)
        for batch, share in self.feed.watch(loader, self._shared(self._drawn(loader, batches), epoch)):
            self.share = share
            self._examples += share.total
            yield batch
        self._made_for = -1
        if self._examples == 0 and self.batch == 0:
            raise SettingError(
                f"{self._job.describe('data')} gave no batches for split={self._split!r}, epoch {epoch}. "
                "Each split needs at least one; return None for split='val' if there is no validation data."
            )

    def _drawn(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of this rank's loader, counted."""
        while True:
            with self._job.guard("data"):
                batch = next(batches, _END)
            has_batch = batch is not _END
            if not self._is_checked:
                self._is_checked = True
                check_distinct(self._job, loader, fingerprint(batch) if has_batch else None, self._ranks)
            if not has_batch:
                return
            if self._first is None:
                self._first = fingerprint(batch)
            self.batch += 1
            yield batch

    def _shared(self, batches: Iterator[Any], epoch: int) -> Iterator[tuple[Any, Share]]:
        def count(batch: Any) -> int:
            return batch_size_of(batch, self._run.batch_size)

        if self._ranks.several:
            length = self.num_batches(epoch)
            yield from share_batches(batches, self._ranks, index=self.batch, length=length, count=count)
            return
        for batch in batches:
            size = count(batch)
            yield batch, Share(size, size)

    def exists(self, epoch: int) -> bool:
        """Whether the job has data for this split; only validation data may be missing."""
        with self._job.guard("data"):
            return self._make(epoch) is not None

    def resumes_in(self, epoch: int) -> bool:
        """Whether a restored position lies in this epoch."""
        return self._resume is not None and self._resume["epoch"] == epoch

    def num_batches(self, epoch: int) -> int | None:
        """The number of batches of an epoch, if its loader has a length."""
        with self._job.guard("data"):
            loader = self._make(epoch)
            try:
                return len(loader)
            except TypeError:  # a generator, or a DataLoader over an IterableDataset
                return None

    def _make(self, epoch: int) -> Any:
        if self._made_for == epoch:
            return self._loader
        self._made_for = epoch
        is_reused = self._loader is not None and hasattr(self._loader, "set_epoch")  # with its worker processes
        is_spent = self._per_epoch or self._loader is None or isinstance(self._loader, Iterator)
        if is_spent and not is_reused:
            self._loader = self._job.call("data", self._run, split=self._split, epoch=epoch)
            check_sampler(self._job, self._loader, self._run)
        # A DistributedSampler whose epoch is not set has the same order in every epoch.
        for part in (self._loader, *samplers_of(self._loader), getattr(self._loader, "dataset", None)):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        return self._loader

    def state(self) -> dict[str, Any]:
        """The position of this rank, as plain values and tensors."""
        own = self._loader.state_dict() if _has_position(self._loader) else None
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "rng": self._rng,
            "first": self._first,
            "loader": own,
            "examples": self._examples,
            "rank": self._run.rank,
            "world_size": self._run.world_size,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved position; call it after the random-number state of the checkpoint was restored.

        On as many ranks as saved it, each needs its own; on another number of ranks, all take that of rank 0.
        """
        self._resume = state

    def _replay(self, loader: Any, saved: dict[str, Any]) -> Iterator[Any]:
        now = rng_state()
        batches: Iterator[Any]
        self._rng, self._examples = saved["rng"], saved.get("examples", 0)
        self.order = SampleOrder(loader, self.epoch, self._rng)
        num_ranks, rank = saved.get("world_size", 1), saved.get("rank", 0)
        is_moved = num_ranks != self._run.world_size
        if not is_moved and rank != self._run.rank and not getattr(loader, "shares_position", False):
            raise SettingError(
                f"This is the data position of rank {rank}, and this process is rank {self._run.rank}, which has other data; restore each rank's own."
            )
        # The position of other loaders is one of a single rank, and says nothing about another division of the data.
        if saved["loader"] is not None and (hasattr(loader, "shares_position") or not is_moved):
            if not _has_position(loader):
                raise SettingError(
                    "The checkpoint was written with a data loader that has state_dict(), and this one has not; use the same loader."
                )
            with self._job.guard("data"):
                loader.load_state_dict(saved["loader"])
                batches = iter(loader)
            self._first, self.batch = saved["first"], saved["batch"]
            if is_moved:
                self._first, self.batch = None, getattr(loader, "batch", self.batch)
        else:
            if self._rng is not None:
                restore_rng(self._rng)
            with self._job.guard("data"):
                batches = iter(loader)
                stop_workers_at_exit(loader)
                if is_moved:
                    self._drop_examples(batches, num_ranks)
                else:
                    self._first, self.batch = saved["first"], saved["batch"]
                    self._drop(batches, saved)
        restore_rng(now)
        return batches

    def _drop_examples(self, batches: Iterator[Any], num_ranks: int) -> None:
        """Drop this rank's part of the examples that another number of ranks has used."""
        part, rest = divmod(self._examples, self._run.world_size)
        dropped = 0
        while dropped < part:
            batch = next(batches, _END)
            if batch is _END:
                break
            self._first = self._first or fingerprint(batch)
            dropped += batch_size_of(batch, self._run.batch_size)
            self.batch += 1
        if rest or dropped != part:
            raise SettingError(
                f"The checkpoint was written by {num_ranks} rank(s) after {self._examples} examples of the epoch, and the batches of "
                f"{self._run.world_size} rank(s) do not end there: each would have to skip {self._examples / self._run.world_size:g} examples. Resume with the same "
                "global batch (ranks times batch), with the same number of ranks, or from a checkpoint at the end of an epoch."
            )
        log_info(
            f"The data position was saved on {num_ranks} rank(s): each of {self._run.world_size} skips {part} examples. No example is repeated or "
            "lost if the data is dealt out to ranks in one order, as DistributedSampler does."
        )

    def _drop(self, batches: Iterator[Any], saved: dict[str, Any]) -> None:
        for index in range(saved["batch"]):
            batch = next(batches, _END)
            if batch is _END:
                raise SettingError(
                    f"The data changed: the checkpoint was written after {saved['batch']} batches, and the epoch now has only {index}. "
                    "Use the same data."
                )
            if index == 0 and saved["first"] is not None and fingerprint(batch) != saved["first"]:
                raise SettingError(
                    "The first batch of this epoch differs from the one of the checkpoint, so the data cannot be repeated. Shuffle with "
                    "torch's generator or with the seed and epoch arguments, or add state_dict() and load_state_dict() to the loader."
                )


_END = object()


def _has_position(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
