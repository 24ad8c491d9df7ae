"""Which samples of its dataset a batch consists of.

A DataLoader does not report the indices that it draws. Their order follows from its sampler and the state of the random-number
generators at the start of the epoch, so it can be drawn again when somebody asks: by a second DataLoader with the same
sampler, over a dataset that returns the index itself. That is exact for torch's own samplers, which draw everything at their
start. Others may have a state that a second pass would change, and are not asked. A loader of any other class may have a
method `sample_indices(epoch, batch)`, as Halfstep's own have.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from halfstep.checkpoint.rng import restore_rng, rng_state

__all__ = ["SampleOrder"]

_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


class SampleOrder:
    """The order of one epoch; create it before the epoch is iterated, with the generators' state at its start."""

    def __init__(self, loader: Any, epoch: int, rng: Any) -> None:
        self._loader, self._epoch, self._rng = loader, epoch, rng
        self._generators = [(each, each.get_state()) for each in _generators_of(loader)]
        # Persistent workers keep the seed that was drawn for them in the first epoch.
        self._is_reused = getattr(loader, "_iterator", None) is not None

    def samples(self, batch: int) -> tuple[int, ...] | None:
        """The indices in the dataset of the batch with this index; None if the loader does not determine them."""
        own = getattr(self._loader, "sample_indices", None)
        if callable(own):
            indices = own(self._epoch, batch)
            return None if indices is None else tuple(map(int, indices))
        if not _is_repeatable(self._loader) or self._rng is None:
            return None
        epoch: int | None = None
        now, states = rng_state(), [each.get_state() for each, _ in self._generators]
        try:
            restore_rng(self._rng)
            for each, state in self._generators:
                each.set_state(state)
            sampler, generator = self._loader.batch_sampler, self._loader.generator
            epoch = _set_epoch(sampler.sampler, self._epoch)
            # DataLoader's iterator draws a seed for its workers before the sampler draws the order; so does this one.
            again: DataLoader[Any] = DataLoader(_Indices(), batch_sampler=sampler, collate_fn=list, generator=generator)
            order = sampler if self._is_reused else again
            indices = next(itertools.islice(order, batch, None), None)
        finally:
            restore_rng(now)
            _set_epoch(self._loader.batch_sampler.sampler, epoch)
            for (each, _), state in zip(self._generators, states, strict=True):
                each.set_state(state)
        return None if indices is None else tuple(map(int, indices))


def _set_epoch(sampler: Any, epoch: int | None) -> int | None:
    """Set the epoch of a DistributedSampler, on which its order depends, and return the one before."""
    if epoch is None or not isinstance(sampler, DistributedSampler):
        return None
    before: int = sampler.epoch
    sampler.set_epoch(epoch)
    return before


class _Indices(Dataset[int]):
    """The dataset whose samples are their own indices."""

    def __getitem__(self, index: int) -> int:
        return index


def _is_repeatable(loader: Any) -> bool:
    """Whether a second pass over the sampler draws the same order and changes nothing."""
    return (
        type(loader) is DataLoader
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.batch_sampler.sampler) in _SAMPLERS
        and (loader.num_workers == 0 or getattr(loader, "in_order", True))
    )


def _generators_of(loader: Any) -> list[torch.Generator]:
    """The generators of a loader's own, each once."""
    if not _is_repeatable(loader):
        return []
    generators = (loader.generator, getattr(loader.batch_sampler.sampler, "generator", None))
    return list({id(each): each for each in generators if each is not None}.values())
