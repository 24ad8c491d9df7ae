"""The training data of a run, with a position that can be saved and gone back to.

A loader that has `state_dict` and `load_state_dict` keeps its own position. For any other iterable the position is a
count: on resume the random number generators are set to where they were when the epoch began, so that the loader
shuffles as it did then, the batches already used are drawn again and dropped, and the generators are set to where they
were when the run stopped. The first batch drawn again is compared with the one of the first time by its fingerprint, so
that data which cannot be repeated is noticed and not trained on twice.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.backends.context import RunContext
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.errors import SettingError
from halfstep.jobs.job import Job, read_arguments

__all__ = ["DataStream", "fingerprint", "to_device"]


def fingerprint(batch: Any) -> str:
    """A digest of a batch's tensors and plain values."""
    digest = hashlib.sha256()
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:  # an address is another one in every process
            digest.update(re.sub(r"\bat 0x[0-9a-f]+", "", repr(leaf)).encode())
    return digest.hexdigest()


def _leaves(batch: Any) -> Iterator[Any]:
    """The leaves of a batch; of an object that shows nothing of itself, those of its attributes as well."""
    for leaf in pytree.tree_leaves(batch):
        yield leaf
        if getattr(type(leaf), "__repr__", None) is object.__repr__:
            yield from pytree.tree_leaves(getattr(leaf, "__dict__", {}))


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`."""
    return pytree.tree_map(lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, batch)


class DataStream:
    """The batches of one split, epoch by epoch."""

    def __init__(self, job: Job, run: RunContext, *, split: str) -> None:
        self._job, self._run, self._split = job, run, split
        asked = read_arguments(job.data)
        # A loader that is not told the epoch is made once and iterated again, as DataLoaders usually are.
        self._per_epoch = "epoch" in {*asked.required, *asked.optional}
        self._loader: Any = None
        self._made_for = -1  # the epoch the loader stands at
        self.epoch = self.batch = 0
        self._rng: Any = None
        self._first: str | None = None
        self._resume: dict[str, Any] | None = None

    def batches(self, epoch: int) -> Iterator[Any]:
        """The batches of `epoch`, from the restored position if that is in it."""
        self.epoch, self.batch = epoch, 0
        with self._job.guard("data"):
            loader = self._make(epoch)
        resume, self._resume = self._resume, None
        if resume is not None and resume["epoch"] == epoch:
            batches = self._replay(loader, resume)
        else:
            self._rng, self._first = rng_state(), None
            with self._job.guard("data"):
                batches = iter(loader)
        while True:
            with self._job.guard("data"):
                batch = next(batches, _END)
            if batch is _END:
                break
            if self._first is None:
                self._first = fingerprint(batch)
            self.batch += 1
            yield batch
        self._made_for = -1
        if self.batch == 0:
            raise SettingError(
                f"{self._job.describe('data')} gave no batches for split={self._split!r}, epoch {epoch}. "
                "Each split needs one at least; without data to validate on, give some of the training data for it."
            )

    def num_batches(self, epoch: int) -> int | None:
        """How many batches the epoch has, if its loader can tell."""
        with self._job.guard("data"):
            loader = self._make(epoch)
            try:
                return len(loader)
            except TypeError:  # a generator has no length, and a DataLoader over an IterableDataset only seems to
                return None

    def _make(self, epoch: int) -> Any:
        if self._made_for == epoch:
            return self._loader
        self._made_for = epoch
        set_epoch = getattr(self._loader, "set_epoch", None)
        if callable(set_epoch):  # keeps its worker processes
            set_epoch(epoch)
        elif self._loader is None or self._per_epoch or isinstance(self._loader, Iterator):  # an iterator is used up
            self._loader = self._job.call("data", self._run, split=self._split, epoch=epoch)
        return self._loader

    def state(self) -> dict[str, Any]:
        """The position, as plain values and tensors."""
        own = self._loader.state_dict() if _keeps_position(self._loader) else None
        return {"epoch": self.epoch, "batch": self.batch, "rng": self._rng, "first": self._first, "loader": own}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved position; the random number generators must be those of that moment by now."""
        self._resume = state

    def _replay(self, loader: Any, saved: dict[str, Any]) -> Iterator[Any]:
        now = rng_state()
        batches: Iterator[Any]
        self._rng, self._first, self.batch = saved["rng"], saved["first"], saved["batch"]
        if saved["loader"] is not None:
            if not _keeps_position(loader):
                raise SettingError(
                    "The run was saved with a data loader that keeps its position, and this one does not; use the same data."
                )
            with self._job.guard("data"):
                loader.load_state_dict(saved["loader"])
                batches = iter(loader)
        else:
            if self._rng is not None:
                restore_rng(self._rng)
            with self._job.guard("data"):
                batches = iter(loader)
                self._drop(batches, saved)
        restore_rng(now)
        return batches

    def _drop(self, batches: Iterator[Any], saved: dict[str, Any]) -> None:
        for index in range(saved["batch"]):
            batch = next(batches, _END)
            if batch is _END:
                raise SettingError(
                    f"The data has fewer batches than when the run was saved ({index} of {saved['batch']}); it changed."
                )
            if index == 0 and saved["first"] is not None and fingerprint(batch) != saved["first"]:
                raise SettingError(
                    "The first batch of this epoch is another than when the run was saved, so the data cannot be repeated. Shuffle by "
                    "torch's generator or by the seed and epoch arguments, or give the loader state_dict()/load_state_dict()."
                )


_END = object()


def _keeps_position(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
