"""From the bytes of an image file to a batch: decoding, cropping and normalizing, the same for folders and shards.

Training images get a random resized crop (8 to 100 % of the area, aspect ratio 3/4 to 4/3) and a random horizontal flip
(Szegedy et al. 2015); validation images are the centre 87.5 % of the shorter side. Workers return 8-bit pixels, a quarter of
the fp32 traffic between processes and to the device; the images are normalized on the device.

An `Augmentation` adds what a recipe asks for. Its training crops are decoded at a reduced size where the crop is larger than
the output: a JPEG decoder can leave out the high frequencies of a picture, which a smaller picture does not have.
"""

from __future__ import annotations

import gc
import importlib
import io
import math
import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.backends.launch import Launch, read_launch
from halfstep.errors import MissingError
from halfstep.jobs.data.augment import RandAugment
from halfstep.jobs.data.mixing import Mixing

__all__ = [
    "PLAIN",
    "Augmentation",
    "Normalizer",
    "centre",
    "collect_before_fork",
    "decode",
    "decoding_problem",
    "default_workers",
    "num_cores",
    "random_crop",
    "ranks_here",
    "require_pillow",
]

# Mean and standard deviation of ImageNet's training pixels, the values that published weights are trained with.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP_AREA, CROP_ASPECT, CROP_TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
VAL_SHARE = 0.875  # 224 of 256
MAX_WORKERS = 8


@dataclass(frozen=True)
class Augmentation:
    """What a recipe changes: how images are resized, and for training how they are augmented and mixed."""

    randaugment: RandAugment | None = None
    mixing: Mixing | None = None
    resample: str = "bilinear"  # or bicubic
    reduced: bool = False  # decode training JPEGs at a reduced size where the crop allows it


PLAIN = Augmentation()


def decode(
    content: bytes, image_size: int, draw: random.Random | None, augmentation: Augmentation = PLAIN
) -> np.ndarray:
    """The pixels (image_size, image_size, 3) of an image file; randomly cropped, flipped and augmented by `draw`, else its centre."""
    pillow = require_pillow()
    with pillow.open(io.BytesIO(content)) as image:
        width, height = image.size
        box = centre(width, height) if draw is None else random_crop(width, height, draw)
        if draw is not None and augmentation.reduced and image.format == "JPEG":
            # The reduction is by 2, 4 or 8, and the crop keeps at least image_size pixels in both directions.
            least = (width * image_size / (box[2] - box[0]), height * image_size / (box[3] - box[1]))
            image.draft(None, (math.ceil(least[0]), math.ceil(least[1])))
        image.load()
        if image.mode == "F":
            raise ValueError("floating-point pixels have no fixed range; store the image with 8 or 16 bits")
        if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion makes everything above 255 white
            image = pillow.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))  # noqa: PLW2901
        if image.mode == "P":  # with transparency it must be converted to RGBA first, or Pillow guesses and warns
            image = image.convert("RGBA")  # noqa: PLW2901
        if image.mode != "RGB":  # otherwise convert would copy
            image = image.convert("RGB")  # noqa: PLW2901
    across, down = image.width / width, image.height / height
    box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    resample = pillow.Resampling[augmentation.resample.upper()]
    image = image.resize((image_size, image_size), resample, box=box)
    if draw is not None:
        if draw.random() < 0.5:
            image = image.transpose(pillow.Transpose.FLIP_LEFT_RIGHT)
        if augmentation.randaugment is not None:
            image = augmentation.randaugment(image, draw)
    return np.asarray(image)


def decoding_problem(error: Exception, *, is_empty: bool) -> str:
    """Why an image file could not be decoded."""
    if is_empty:
        return "the file is empty"
    if type(error).__name__ == "UnidentifiedImageError":  # its message names a buffer in memory
        return "it is not an image in a format that Pillow reads"
    return f"{type(error).__name__}: {error}"


class Normalizer:
    """Turns 8-bit pixels (n, height, width, 3) into normalized fp32 images (n, 3, height, width) on a device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._mean = torch.tensor(MEAN, device=self.device).mul_(255).view(1, 3, 1, 1)
        self._deviation = torch.tensor(DEVIATION, device=self.device).mul_(255).view(1, 3, 1, 1)

    def __call__(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The images and labels on the device."""
        images = pixels.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float()
        return images.sub_(self._mean).div_(self._deviation).contiguous(), labels.to(self.device, non_blocking=True)


def random_crop(width: int, height: int, draw: random.Random) -> tuple[float, float, float, float]:
    """A random part of the image, as (left, top, right, bottom); the centre if no crop fits a very long image."""
    for _ in range(CROP_TRIES):
        area = width * height * draw.uniform(*CROP_AREA)
        aspect = math.exp(draw.uniform(math.log(CROP_ASPECT[0]), math.log(CROP_ASPECT[1])))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, top = draw.randint(0, width - wide), draw.randint(0, height - high)
            return left, top, left + wide, top + high
    side = min(width, height)
    return _box(width, height, side)


def centre(width: int, height: int) -> tuple[float, float, float, float]:
    """The centre of the image; resizing this box equals resizing the image and cropping its centre, in one step."""
    return _box(width, height, VAL_SHARE * min(width, height))


def _box(width: int, height: int, side: float) -> tuple[float, float, float, float]:
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def collect_before_fork() -> None:
    """Collect garbage, for workers that are about to be forked: one that frees a CUDA tensor of this process is aborted."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()


def default_workers(cores: int, num_ranks: int, most: int = MAX_WORKERS) -> int:
    """A fair share of the cores of a machine with `num_ranks` processes, from 1 to `most`.

    A decoding process that waits for a core only costs memory.
    """
    return max(1, min(most, cores // num_ranks))


def ranks_here(world_size: int) -> int:
    """How many of `world_size` processes share this machine: the launcher's number, or all if no launcher started them."""
    launch = read_launch() if world_size > 1 else Launch()
    return launch.local_world_size if launch.world_size == world_size else world_size


def num_cores() -> int:
    """The cores that this process may run on, or all of them if the system does not report that."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def require_pillow() -> Any:
    """Pillow's Image module."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingError('Reading images needs Pillow; install it with: pip install "halfstep[vision]"') from error
