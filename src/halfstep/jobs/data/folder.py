"""ImageNet-style folders: DIR/train/CLASS/*.jpeg and DIR/val/CLASS/*.jpeg, decoded by Pillow in worker processes.

How it works. The file list is read once; the label of a class is its index in the sorted list of folders, and both
splits must have the same folders. Workers receive (epoch, example indices) and decode (`pictures`). The crop is a function of
(seed, epoch, example index), so it depends neither on the number of workers nor on earlier reads; so is the rest of an
`Augmentation`, and the mixing of a batch is one of (seed, epoch, index of its first example).

A file that cannot be decoded stops the run with its name. Substituting another image would silently train on other
data than requested.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from halfstep.errors import SettingError
from halfstep.events import log_warning
from halfstep.jobs.data.feed import Decoding
from halfstep.jobs.data.loader import Batch, Order, OrderedLoader, mix
from halfstep.jobs.data.pictures import (
    PLAIN,
    Augmentation,
    Normalizer,
    collect_before_fork,
    decode,
    decoding_problem,
    default_workers,
    num_cores,
    ranks_here,
    require_pillow,
)
from halfstep.jobs.data.workers import stop_workers_at_exit
from halfstep.jobs.job import SPLITS

__all__ = ["FolderImages", "ImageFolder", "scan_folder"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".gif", ".tif", ".tiff")


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
    names = {split: sorted(entry.name for entry in _visible(root / split) if entry.is_dir()) for split in SPLITS}
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
    if len(names["train"]) == 1:
        log_warning(f"{root} has one class, {names['train'][0]}: every prediction is right, and nothing is learned.")
    files = {split: _list_files(root / split, names[split]) for split in SPLITS}
    return ImageFolder(root, tuple(names["train"]), files)


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    """The entries whose names do not start with a dot: notebooks and macOS leave such folders, and files like ._0.jpg."""
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _list_files(split: Path, classes: list[str]) -> tuple[tuple[str, int], ...]:
    files: list[tuple[str, int]] = []
    others: list[str] = []
    for number, name in enumerate(classes):
        entries = sorted(entry.path for entry in _visible(split / name) if entry.is_file())
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


class FolderImages(OrderedLoader):
    """Batches (images, labels) from an ImageNet-style folder, normalized, on `device`.

    Args:
        folder: the result of `scan_folder`.
        split: "train" (shuffled, randomly cropped and flipped) or "val".
        batch_size: images per batch in this process.
        image_size: side of the square output images in pixels.
        num_workers: decoding processes; by default the CPU cores per process on this machine, 1 to 8. 0 decodes in this process.
        seed: seed of the order, the crops and the flips.
        epoch: the first epoch.
        rank: rank of this process.
        world_size: number of processes.
        drop_last: whether training leaves out a short last global batch.
        augmentation: a recipe's; with mixing, training labels are probabilities (batch, classes).
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
        drop_last: bool = True,
        augmentation: Augmentation = PLAIN,
        device: torch.device | str = "cpu",
    ) -> None:
        require_pillow()  # fail here, not in a worker
        if image_size < 1:
            raise SettingError(f"image_size={image_size} must be at least 1.")
        num_examples = len(folder.files[split]) if split in SPLITS else 0
        order = Order(num_examples, batch_size, split, seed, rank, world_size, drop_last)
        self._normalize = Normalizer(device)
        if num_workers is None:
            num_workers = default_workers(num_cores(), ranks_here(world_size))
        self._mixing = augmentation.mixing if split == "train" else None
        self.decoding = Decoding(max(1, num_workers))
        self._queue: list[tuple[int, list[int]]] = []
        self._workers: DataLoader[Any] = DataLoader(
            _Decoder(folder.files[split], image_size, seed, augmentation, train=split == "train"),
            batch_size=None,  # each item of the sampler is a complete batch
            sampler=_Queue(self._queue),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=self._normalize.device.type == "cuda",
            # DataLoader draws a number per epoch; from the global generator that would change the run's dropout.
            generator=torch.Generator(),
        )
        super().__init__(order, {"image_size": image_size}, epoch)

    @property
    def num_examples(self) -> int:
        """Examples in an epoch, over all processes."""
        return self._order.num_examples

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        rows = self._rows(epoch)[first:]
        self._queue[:] = [(epoch, each.tolist()) for each in rows]
        collect_before_fork()
        batches = iter(self._workers)
        stop_workers_at_exit(self._workers)
        for own, decoded in zip(rows, batches, strict=True):
            if isinstance(decoded, _Unreadable):
                raise SettingError(
                    f"The image {decoded.path} cannot be decoded: {decoded.reason}. Repair, replace or remove the file and resume; "
                    "Halfstep does not substitute another image."
                )
            pixels, labels, seconds = decoded
            self.decoding.add(len(labels), seconds)
            batch = self._normalize(pixels, labels)
            if self._mixing is not None:
                batch = self._mixing(*batch, mix("mixing", self._order.seed, epoch, int(own[0])))
            yield batch


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

    def __init__(
        self,
        files: tuple[tuple[str, int], ...],
        image_size: int,
        seed: int,
        augmentation: Augmentation = PLAIN,
        *,
        train: bool,
    ) -> None:
        # Arrays, not tuples: reading a Python object changes its reference count, and that alone makes each forked
        # worker copy the list page by page.
        self._paths = np.array([path.encode() for path, _ in files])
        self._labels = np.array([label for _, label in files])
        self._image_size, self._seed, self._train = image_size, seed, train
        self._augmentation = augmentation

    def __getitem__(self, item: tuple[int, list[int]]) -> tuple[Tensor, Tensor, float] | _Unreadable:
        """The pixels and labels of a batch, and the seconds that decoding it took."""
        epoch, rows = item
        start = time.perf_counter()
        pixels = np.empty((len(rows), self._image_size, self._image_size, 3), dtype=np.uint8)
        for index, row in enumerate(rows):
            path = bytes(self._paths[row]).decode()
            try:
                pixels[index] = self._decode(path, epoch, row)
            except Exception as error:  # Pillow's plugins raise almost anything on a damaged file
                is_empty = Path(path).is_file() and not Path(path).stat().st_size
                return _Unreadable(path, decoding_problem(error, is_empty=is_empty))
        return torch.from_numpy(pixels), torch.from_numpy(self._labels[rows]), time.perf_counter() - start

    def _decode(self, path: str, epoch: int, row: int) -> np.ndarray:
        draw = random.Random(mix("crop", self._seed, epoch, row)) if self._train else None  # noqa: S311 - not for secrets
        return decode(Path(path).read_bytes(), self._image_size, draw, self._augmentation)
