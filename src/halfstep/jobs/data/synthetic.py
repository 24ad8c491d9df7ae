"""Synthetic images, made on the device: full-size work for a GPU with no files and no waiting for them.

An image is noise plus a coarse pattern that belongs to its class, so that a model can learn the classes and a
loss curve means something; pure noise would only be memorised. Each batch is a function of (seed, split, epoch,
number of the batch, rank), so every precision sees the same images, and any batch can be made without those
before it. CPU and GPU draw different numbers from one seed: the images are the same between runs on one kind of
device, not between kinds.

An epoch is a fixed number of batches, because there is no data set to exhaust: 100 for train, 10 for val.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.jobs.data.loader import Batch, Loader, check_place, mix

__all__ = ["SyntheticImages"]

NUM_BATCHES = {"train": 100, "val": 10}
PATTERN_SIDE = 4  # cells along each side of a class's pattern: coarse, so that any patch size sees it
PATTERN_SHARE = 0.5  # of the amplitude; the rest is noise, which keeps the classes from being told apart at once


class SyntheticImages(Loader):
    """Batches (images, labels) of made-up square images with about zero mean and unit deviation.

    Args:
        split: "train" or "val"; both have the same classes, with different noise.
        batch_size: images per batch in this process.
        image_size: side in pixels.
        num_classes: number of different labels.
        channels: image channels.
        num_batches: batches per epoch; 100 for train and 10 for val unless given.
        seed: what everything is drawn from.
        epoch: where to start.
        rank: number of this process; each draws its own images.
        world_size: number of processes.
        device: where the images are made.
    """

    def __init__(
        self,
        split: str,
        batch_size: int,
        *,
        image_size: int = 224,
        num_classes: int = 1000,
        channels: int = 3,
        num_batches: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        check_place(split, batch_size, rank, world_size)
        num_batches = NUM_BATCHES[split] if num_batches is None else num_batches
        if min(image_size, num_classes, channels, num_batches) < 1:
            raise SettingError(
                f"image_size={image_size}, num_classes={num_classes}, channels={channels} and num_batches={num_batches} "
                "must all be at least 1."
            )
        self._device = torch.device(device)
        self._shape = (batch_size, channels, image_size, image_size)
        self._num_classes = num_classes
        self._key = (seed, split)
        self._rank = rank
        generator = self._generator("patterns", seed)
        self._patterns = torch.randn(
            num_classes, channels, PATTERN_SIDE, PATTERN_SIDE, generator=generator, device=self._device
        )
        identity: dict[str, int | str] = {
            "split": split,
            "batch_size": batch_size,
            "seed": seed,
            "world_size": world_size,
            "image_size": image_size,
            "num_classes": num_classes,
            "channels": channels,
            "num_batches": num_batches,
        }
        super().__init__(identity, num_batches, epoch)

    def _generator(self, *parts: int | str) -> torch.Generator | None:
        # The meta device holds no numbers and has no generator: shapes are all that is asked of it.
        return None if self._device.type == "meta" else torch.Generator(self._device).manual_seed(mix(*parts))

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        for number in range(first, len(self)):
            yield self._make(epoch, number)

    def _make(self, epoch: int, number: int) -> Batch:
        generator = self._generator("batch", *self._key, epoch, number, self._rank)
        images: Tensor = torch.randn(self._shape, generator=generator, device=self._device)
        labels = torch.randint(self._num_classes, self._shape[:1], generator=generator, device=self._device)
        patterns = torch.nn.functional.interpolate(self._patterns[labels], size=self._shape[2:])
        # Squares of the two shares add to one, so the sum keeps unit deviation.
        images.mul_((1 - PATTERN_SHARE**2) ** 0.5).add_(patterns, alpha=PATTERN_SHARE)
        return images, labels
