"""Synthetic text and other named inputs, generated on the device: a load for any model without files or input stalls.

How tokens are drawn. Half of them are the successor of the token before them (the next id), the others follow Zipf's
law: the k-th id has a probability of about 1/k. So a language model has something to learn: its loss falls from
ln(vocabulary) to the entropy of the frequencies, then of the successors; uniform tokens could only be memorized.

A batch is a dict of tensors and a function of (seed, split, epoch, batch index, rank), as for the synthetic images:
every precision gets the same batches, reproducible on one type of device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.jobs.data.loader import Loader, check_settings, mix
from halfstep.jobs.data.synthetic import NUM_BATCHES

__all__ = ["Draw", "MakeBatch", "NamedTensors", "SyntheticInputs"]

NamedTensors = dict[str, Tensor]
SUCCESSOR_SHARE = 0.5  # of the tokens


@dataclass(frozen=True)
class Draw:
    """Random tensors on one device, in the order in which they are requested."""

    generator: torch.Generator | None  # None on the meta device, which has no values
    device: torch.device

    def uniform(self, *shape: int) -> Tensor:
        """Numbers in [0, 1)."""
        return torch.rand(shape, generator=self.generator, device=self.device)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator, device=self.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Integers from 0 to `high` - 1, equally likely."""
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def tokens(self, num_tokens: int, rows: int, length: int, shift: Tensor | None = None) -> Tensor:
        """Sequences of ids below `num_tokens`; `shift` rotates the ids of each row, so that rows can differ by class."""
        ranks = self.uniform(rows, length).mul_(math.log(num_tokens + 1)).exp_().long().sub_(1)
        position = torch.arange(length, device=self.device).expand(rows, length)
        starts = self.uniform(rows, length) >= SUCCESSOR_SHARE
        start = (position * starts).cummax(1).values  # where the run of successors that includes this position begins
        ids = ranks.gather(1, start) + position - start
        if shift is not None:
            ids = ids + shift[:, None]
        return ids % num_tokens


MakeBatch = Callable[[Draw, int], NamedTensors]  # takes the number of examples


class SyntheticInputs(Loader):
    """Batches of named tensors from a function that draws them.

    Args:
        make: builds one batch from a `Draw` and the number of examples.
        kind: what the batches are and their sizes, for checking a resumed position.
        split: "train" or "val"; both are drawn by the same rules.
        batch_size: examples per batch in this process.
        seed: seed of all random numbers.
        epoch: the first epoch.
        rank: rank of this process; each generates different examples.
        world_size: number of processes.
        device: device on which the batches are generated.
    """

    def __init__(
        self,
        make: MakeBatch,
        kind: str,
        split: str,
        batch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        check_settings(split, batch_size, rank, world_size)
        self._make = make
        self._batch_size = batch_size
        self._device = torch.device(device)
        self._key = (seed, split)
        self._rank = rank
        identity: dict[str, int | str] = {
            "split": split,
            "batch_size": batch_size,
            "seed": seed,
            "world_size": world_size,
            "kind": kind,
        }
        super().__init__(identity, NUM_BATCHES[split], epoch)

    def _batches(self, epoch: int, first: int) -> Iterator[NamedTensors]:
        for number in range(first, len(self)):
            seed = mix("batch", *self._key, epoch, number, self._rank)
            fake = self._device.type == "meta"
            generator = None if fake else torch.Generator(self._device).manual_seed(seed)
            yield self._make(Draw(generator, self._device), self._batch_size)
