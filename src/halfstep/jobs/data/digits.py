"""The handwritten digits that ship with Halfstep: 1,797 images of 8 by 8 pixels, small enough for any machine.

DIGITS.md in this folder describes their origin and licence. The split is fixed and needs no random numbers: of the
images sorted by digit (in file order within a digit), every fifth is used for validation. That is 360 images, and
1,437 for training; every digit has the same share of each, to within one image.

Training images get a little noise, which is a function of (seed, epoch): without it the `digits` job ends at 94 to 98 %
validation accuracy depending on the seed, with it all seeds reach 98 %. All images are in memory on the device of the
run, so a batch costs a gather and an addition, and no worker process.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import HalfstepError, unknown
from halfstep.jobs.data.loader import Batch, Order, OrderedLoader, mix
from halfstep.jobs.job import SPLITS

__all__ = ["Digits", "DigitsLoader", "load_digits"]

FILE = "digits.csv.gz"
SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
NUM_IMAGES, SIDE, LARGEST_PIXEL = 1797, 8, 16
VAL_EVERY = 5
NUM_VAL = (NUM_IMAGES + VAL_EVERY - 1) // VAL_EVERY
NUM_TRAIN = NUM_IMAGES - NUM_VAL
TRAIN_NOISE = 0.3  # standard deviation, for pixels in [-1, 1]; 0.2 and 0.4 are as good, 0.6 is too much


@dataclass(frozen=True)
class Digits:
    """One split: images of shape (n, 1, 8, 8) in [-1, 1] and labels from 0 to 9."""

    images: Tensor
    labels: Tensor


@functools.cache
def load_digits(split: str) -> Digits:
    """The images and labels of "train" or "val", on the CPU, without noise; read once."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    pixels, labels = _read()
    by_digit = np.argsort(labels, kind="stable")
    chosen = np.zeros(len(labels), dtype=bool)
    chosen[by_digit[::VAL_EVERY]] = True
    rows = np.flatnonzero(chosen if split == "val" else ~chosen)
    images = torch.from_numpy(pixels[rows].astype(np.float32)).reshape(-1, 1, SIDE, SIDE)
    return Digits(images * (2 / LARGEST_PIXEL) - 1, torch.from_numpy(labels[rows].astype(np.int64)))


def _read() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (1797, 64) and labels (1797,) from the packaged file, after checking its SHA-256."""
    try:
        data = Path(__file__).with_name(FILE).read_bytes()
    except FileNotFoundError as error:
        raise HalfstepError(f"The file {FILE} is missing from the halfstep package; reinstall halfstep.") from error
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise HalfstepError(
            f"The file {FILE} in the halfstep package was modified: its SHA-256 is not {SHA256[:16]}...; reinstall halfstep."
        )
    lines = gzip.decompress(data).decode("ascii").split()
    table = np.array([line.split(",") for line in lines], dtype=np.uint8)
    assert table.shape == (NUM_IMAGES, SIDE * SIDE + 1)
    return table[:, :-1], table[:, -1]


class DigitsLoader(OrderedLoader):
    """Batches (images, labels) of the digits on `device`."""

    def __init__(
        self,
        split: str,
        batch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        digits = load_digits(split)
        order = Order(len(digits.labels), batch_size, split, seed, rank, world_size, drop_last)
        self._images, self._labels = digits.images.to(device), digits.labels.to(device)
        super().__init__(order, {}, epoch)

    @property
    def num_examples(self) -> int:
        """Examples in an epoch, over all processes."""
        return self._order.num_examples

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        images = self._images
        if self._order.split == "train":
            # For all examples and on the CPU, so that it depends neither on the device nor on the number of processes.
            generator = torch.Generator().manual_seed(mix("noise", self._order.seed, epoch))
            noise = torch.randn(images.shape, generator=generator)
            images = torch.add(images, noise.to(images.device), alpha=TRAIN_NOISE)
        for rows in self._rows(epoch)[first:]:
            chosen = rows.to(images.device)
            yield images[chosen], self._labels[chosen]
