"""ImageNet-style folders: DIR/train/CLASS/*.jpeg and DIR/val/CLASS/*.jpeg, decoded by Pillow in worker processes.

How it works. The file list is read once; the label of a class is its index in the sorted list of folders, and both
splits must have the same folders. Workers receive (epoch, example indices) and return 8-bit pixels, a quarter of the
fp32 traffic between processes and to the device; the images are normalized on the device.

Training images get a random resized crop (8 to 100 % of the area, aspect ratio 3/4 to 4/3) and a random horizontal flip
(Szegedy et al. 2015); validation images are the centre 87.5 % of the shorter side. The crop is a function of (seed,
epoch, example index), so it depends neither on the number of workers nor on earlier reads.

A file that cannot be decoded stops the run with its name. Substituting another image would silently train on other
data than requested.
"""

from __future__ import annotations

import importlib
import io
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from halfstep.errors import MissingError, SettingError
from halfstep.events import log_warning
from halfstep.jobs.data.loader import Batch, Loader, Order, mix, order_identity
from halfstep.jobs.job import SPLITS

__all__ = ["FolderImages", "ImageFolder", "scan_folder"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".gif", ".tif", ".tiff")
# Mean and standard deviation of ImageNet's training pixels, the values that published weights are trained with.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP_AREA, CROP_ASPECT, CROP_TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
VAL_SHARE = 0.875  # 224 of 256
MAX_WORKERS = 8


@dataclass(frozen=True)
class ImageFolder:
    """The contents of a folder: class names, and for each split the files with their labels."""

    root: Path
    classes: tuple[str, ...]
    files: dict[str, tuple[tuple[str, int], ...]]


def scan_folder(root: str | os.PathLike[str]) -> ImageFolder:
    """List all images in an ImageNet-style folder, without decoding them."""
    root = Path(root).expanduser()
    if not root.is_dir():
        raise SettingError(f"The data folder {root} does not exist or is not a folder; check the path.")
    absent = [split for split in SPLITS if not (root / split).is_dir()]
    if absent:
        contents = ", ".join(sorted(p.name for p in root.iterdir())[:8]) or "nothing"
        raise SettingError(
            f"The data folder {root} has no {' and no '.join(absent)} folder (it has: {contents}). "
            "It needs train/CLASS/*.jpeg and val/CLASS/*.jpeg."
        )
    names = {split: sorted(entry.name for entry in os.scandir(root / split) if entry.is_dir()) for split in SPLITS}
    for split in SPLITS:
        if not names[split]:
            raise SettingError(
                f"{root / split} has no class folders; put the images into {split}/CLASS/, one folder per class."
            )
    if names["train"] != names["val"]:
        differing = sorted({*names["train"]} ^ {*names["val"]})
        raise SettingError(
            f"{root}/train has {len(names['train'])} class folders and {root}/val has {len(names['val'])}; they must be the "
            f"same, because their order defines the labels. Only in one of them: {', '.join(differing[:8])}."
        )
    files = {split: _list_files(root / split, names[split]) for split in SPLITS}
    return ImageFolder(root, tuple(names["train"]), files)


def _list_files(split: Path, classes: list[str]) -> tuple[tuple[str, int], ...]:
    files: list[tuple[str, int]] = []
    others: list[str] = []
    for number, name in enumerate(classes):
        entries = sorted(entry.path for entry in os.scandir(split / name) if entry.is_file())
        images = [path for path in entries if path.lower().endswith(SUFFIXES)]
        others += [path for path in entries if not path.lower().endswith(SUFFIXES)]
        if not images:
            log_warning(f"The class folder {split / name} has no images.")
        files += [(path, number) for path in images]
    if others:
        log_warning(
            f"{len(others)} file(s) under {split} do not have an image suffix and are ignored, e.g. {others[0]}."
        )
    if not files:
        raise SettingError(f"There are no images under {split}; expected files ending in {', '.join(SUFFIXES)}.")
    return tuple(files)


class FolderImages(Loader):
    """Batches (images, labels) from an ImageNet-style folder, normalized, on `device`.

    Args:
        folder: the result of `scan_folder`.
        split: "train" (shuffled, randomly cropped and flipped) or "val".
        batch_size: images per batch in this process.
        image_size: side of the square output images in pixels.
        num_workers: decoding processes; by default the CPU cores per process, 1 to 8. 0 decodes in this process.
        seed: seed of the order, the crops and the flips.
        epoch: the first epoch.
        rank: rank of this process.
        world_size: number of processes.
        device: device of the batches.
    """

    def __init__(
        self,
        folder: ImageFolder,
        split: str,
        batch_size: int,
        *,
        image_size: int = 224,
        num_workers: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        _pillow()  # fail here, not in a worker
        if image_size < 1:
            raise SettingError(f"image_size={image_size} must be at least 1.")
        num_examples = len(folder.files[split]) if split in SPLITS else 0
        self._order = Order(num_examples, batch_size, split, seed, rank, world_size)
        self._device = torch.device(device)
        self._mean = torch.tensor(MEAN, device=self._device).mul_(255).view(1, 3, 1, 1)
        self._deviation = torch.tensor(DEVIATION, device=self._device).mul_(255).view(1, 3, 1, 1)
        if num_workers is None:
            num_workers = _default_workers(_num_cores(), world_size)
        self._queue: list[tuple[int, list[int]]] = []
        self._workers: DataLoader[Any] = DataLoader(
            _Decoder(folder.files[split], image_size, seed, train=split == "train"),
            batch_size=None,  # each item of the sampler is a complete batch
            sampler=_Queue(self._queue),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=self._device.type == "cuda",
            # DataLoader draws a number per epoch; from the global generator that would change the run's dropout.
            generator=torch.Generator(),
        )
        super().__init__({**order_identity(self._order), "image_size": image_size}, self._order.num_batches, epoch)

    @property
    def num_examples(self) -> int:
        """Examples in an epoch, over all processes."""
        return self._order.num_examples

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        self._queue[:] = [(epoch, rows.tolist()) for rows in self._order.batches(epoch)[first:]]
        for decoded in self._workers:
            if isinstance(decoded, _Unreadable):
                raise SettingError(
                    f"The image {decoded.path} cannot be decoded: {decoded.reason}. Repair, replace or remove the file and resume; "
                    "Halfstep does not substitute another image."
                )
            pixels, labels = decoded
            images = pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2).float()
            yield images.sub_(self._mean).div_(self._deviation).contiguous(), labels.to(self._device, non_blocking=True)

    def sample_indices(self, epoch: int, batch: int) -> list[int]:
        """The files that a batch consists of, by their index in the split."""
        indices: list[int] = self._order.batches(epoch)[batch].tolist()
        return indices


class _Queue:
    """The batches to decode; read again for every epoch, so that the workers can stay alive."""

    def __init__(self, queue: list[tuple[int, list[int]]]) -> None:
        self._queue = queue

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return iter(tuple(self._queue))

    def __len__(self) -> int:
        return len(self._queue)


@dataclass(frozen=True)
class _Unreadable:
    """Returned by a worker instead of a batch; an exception would have the worker's traceback in its message."""

    path: str
    reason: str


class _Decoder(Dataset[Any]):
    """Decodes one batch at a time, in the workers."""

    def __init__(self, files: tuple[tuple[str, int], ...], image_size: int, seed: int, *, train: bool) -> None:
        # Arrays, not tuples: reading a Python object changes its reference count, and that alone makes each forked
        # worker copy the list page by page.
        self._paths = np.array([path.encode() for path, _ in files])
        self._labels = np.array([label for _, label in files])
        self._image_size, self._seed, self._train = image_size, seed, train

    def __getitem__(self, item: tuple[int, list[int]]) -> tuple[Tensor, Tensor] | _Unreadable:
        epoch, rows = item
        pixels = np.empty((len(rows), self._image_size, self._image_size, 3), dtype=np.uint8)
        for index, row in enumerate(rows):
            path = bytes(self._paths[row]).decode()
            try:
                pixels[index] = self._decode(path, epoch, row)
            except Exception as error:  # Pillow's plugins raise almost anything on a damaged file
                return _Unreadable(path, f"{type(error).__name__}: {error}")
        return torch.from_numpy(pixels), torch.from_numpy(self._labels[rows])

    def _decode(self, path: str, epoch: int, row: int) -> np.ndarray:
        pillow = _pillow()
        with pillow.open(io.BytesIO(Path(path).read_bytes())) as image:
            # A palette with transparency must be converted to RGBA first, or Pillow guesses and warns.
            image = image.convert("RGBA").convert("RGB") if image.mode == "P" else image.convert("RGB")  # noqa: PLW2901
        draw = random.Random(mix("crop", self._seed, epoch, row))  # noqa: S311 - not for secrets
        width, height = image.size
        box = _random_crop(width, height, draw) if self._train else _centre(width, height)
        size = (self._image_size, self._image_size)
        pixels = np.asarray(image.resize(size, pillow.Resampling.BILINEAR, box=box))
        return pixels[:, ::-1] if self._train and draw.random() < 0.5 else pixels


def _random_crop(width: int, height: int, draw: random.Random) -> tuple[float, float, float, float]:
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


def _centre(width: int, height: int) -> tuple[float, float, float, float]:
    """The centre of the image; resizing this box equals resizing the image and cropping its centre, in one step."""
    return _box(width, height, VAL_SHARE * min(width, height))


def _box(width: int, height: int, side: float) -> tuple[float, float, float, float]:
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _default_workers(cores: int, world_size: int) -> int:
    """A fair share of the cores, from 1 to 8: a decoding process that waits for a core only costs memory."""
    return max(1, min(MAX_WORKERS, cores // world_size))


def _num_cores() -> int:
    """The cores that this process may run on, or all of them if the system does not report that."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingError(
            'Reading image folders needs Pillow; install it with: pip install "halfstep[vision]"'
        ) from error
