"""Synthetic images, generated on the device: a full-size load for a GPU without files or input stalls.

An image is noise plus a coarse pattern for its class, so that a model can learn the classes and the loss curve is
meaningful; pure noise could only be memorized. Each batch is a function of (seed, split, epoch, batch index, rank), so
every precision gets the same images, and any batch can be generated without the ones before it. CPU and GPU draw
different numbers from the same seed, so images are reproducible on one type of device, not across types.

An epoch is a fixed number of batches, because the data has no end: 100 for training, 10 for validation.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.jobs.data.loader import Batch, Loader, check_settings, mix

__all__ = ["NUM_BATCHES", "PATTERN_SIDE", "SyntheticImages", "add_patterns"]

NUM_BATCHES = {"train": 100, "val": 10}
PATTERN_SIDE = 4  # cells along each side of a class's pattern: coarse enough for any patch size
PATTERN_SHARE = 0.5  # of the amplitude; the rest is noise, so that the classes are not learned immediately


class SyntheticImages(Loader):
    """Batches (images, labels) of generated square images with about zero mean and unit standard deviation.

    Args:
        split: "train" or "val"; both have the same classes, with different noise.
        batch_size: images per batch in this process.
        image_size: side in pixels.
        num_classes: number of labels.
        channels: image channels.
        num_batches: batches per epoch; by default 100 for train and 10 for val.
        seed: seed of all random numbers.
        epoch: the first epoch.
        rank: rank of this process; each generates different images.
        world_size: number of processes.
        device: device on which the images are generated.
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
        check_settings(split, batch_size, rank, world_size)
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
        # The meta device has no values and no generator; only shapes are needed there.
        return None if self._device.type == "meta" else torch.Generator(self._device).manual_seed(mix(*parts))

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        for number in range(first, len(self)):
            yield self._make(epoch, number)

    def _make(self, epoch: int, number: int) -> Batch:
        generator = self._generator("batch", *self._key, epoch, number, self._rank)
        images: Tensor = torch.randn(self._shape, generator=generator, device=self._device)
        labels = torch.randint(self._num_classes, self._shape[:1], generator=generator, device=self._device)
        return add_patterns(images, self._patterns[labels]), labels


def add_patterns(noise: Tensor, patterns: Tensor) -> Tensor:
    """Images from noise and one coarse pattern each, changed in place; both have unit standard deviation, and so has the sum."""
    patterns = torch.nn.functional.interpolate(patterns, size=noise.shape[2:])
    # The squares of the two shares add up to one.
    return noise.mul_((1 - PATTERN_SHARE**2) ** 0.5).add_(patterns, alpha=PATTERN_SHARE)
