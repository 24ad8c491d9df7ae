"""Images from WebDataset shards, in the order in which they stand there, a shuffle buffer apart.

How it works. The shards of an epoch are permuted by (seed, epoch). Rank r reads every W-th of them from the r-th on, and its
workers divide those in the same way. Each worker shuffles its examples in a buffer, seeded by (seed, epoch, rank, worker), and
decodes complete batches; what is left at the end of each worker is joined to further batches. Training drops a short last
batch, validation keeps it.

Shards can only be read from their start, so a position is a number of batches, and resuming reads again what came before,
without decoding it: exact with the same number of ranks and workers. (The number of workers is taken from the position.) The
order is a different one for another number of ranks; a run continues on another number from the end of an epoch.
Ranks whose shards have fewer examples end earlier; `train.shares` keeps them in step.

A shard or an example that cannot be read stops the run with its name and key. tarfile takes a damaged header for the end of
the file, so what follows the end is looked at as well.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from halfstep.errors import SettingError
from halfstep.jobs.data.loader import Batch, Loader, check_settings, mix
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
from halfstep.jobs.data.shards import CLASSES, Shards, require_webdataset

__all__ = ["ShardImages"]

IMAGE_KEYS = ("jpg", "jpeg", "png", "webp")
LABEL_KEY = "cls"
SHUFFLE = 1000  # examples in a worker's buffer, about 100 MB of ImageNet's files; webdataset's default
_READ_BYTES = 2**20


class ShardImages(Loader):
    """Batches (images, labels) from WebDataset shards, normalized, on `device`; without a length.

    Args:
        shards: the result of `find_shards`.
        split: "train" (shuffled, randomly cropped and flipped) or "val".
        batch_size: images per batch in this process.
        image_size: side of the square output images in pixels.
        num_workers: decoding processes, at most one per shard of this rank; by default the CPU cores per process on this machine, 1 to 8.
        shuffle: examples in the shuffle buffer of each worker.
        seed: seed of the order, the crops and the flips.
        epoch: the first epoch.
        rank: rank of this process.
        world_size: number of processes; at most as many as training shards.
        augmentation: a recipe's; with mixing, training labels are probabilities (batch, classes).
        device: device of the batches.
    """

    shares_position = False  # ranks may end at different times
    decoding = None  # not measured: workers read and decode by turns

    def __init__(
        self,
        shards: Shards,
        split: str,
        batch_size: int,
        *,
        image_size: int = 224,
        num_workers: int | None = None,
        shuffle: int = SHUFFLE,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        augmentation: Augmentation = PLAIN,
        device: torch.device | str = "cpu",
    ) -> None:
        check_settings(split, batch_size, rank, world_size)
        require_pillow()  # fail here, not in a worker
        require_webdataset("tariterators")
        if min(image_size, shuffle) < 1:
            raise SettingError(f"image_size={image_size} and shuffle={shuffle} must be at least 1.")
        files = shards.files[split]
        if len(files) < (world_size if split == "train" else 1):
            raise SettingError(
                f"There are {len(files)} {split} shards for {world_size} ranks, and each rank reads its own. Start at most {len(files)} "
                f"ranks, or write the data into at least {world_size} shards (webdataset.ShardWriter with a smaller maxcount)."
            )
        if num_workers is None:
            num_workers = default_workers(num_cores(), ranks_here(world_size))
        self._source = _Source(shards, split, batch_size, image_size, shuffle, seed, rank, world_size, augmentation)
        self._num_workers = min(num_workers, max(1, len(files) // world_size))
        self._normalize = Normalizer(device)
        names = hashlib.sha256("\n".join(Path(file).name for file in files).encode()).hexdigest()[:16]
        identity: dict[str, int | str] = {
            "split": split,
            "shards": names,
            "batch_size": batch_size,
            "seed": seed,
            "world_size": world_size,
            "image_size": image_size,
            "shuffle": shuffle,
        }
        super().__init__(identity, None, epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank."""
        return super().state_dict() | {"num_workers": self._num_workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the batches that would have followed, on as many workers as then."""
        super().load_state_dict(state)
        num_workers = state.get("num_workers")
        if not isinstance(num_workers, int) or num_workers < 0:
            raise SettingError(
                f"The data position has num_workers={num_workers!r}, not a number; the checkpoint is damaged."
            )
        self._num_workers = num_workers

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        workers = max(1, self._num_workers)
        # At most `workers` batches are joined from what workers have left, so these come before the position.
        reader = _Reader(self._source, epoch, skipped=max(0, first // workers - 2))
        collect_before_fork()
        chunks: DataLoader[Any] = DataLoader(
            reader,
            batch_size=None,
            num_workers=self._num_workers,
            pin_memory=self._normalize.device.type == "cuda",
            # DataLoader draws a number per epoch; from the global generator that would change the run's dropout.
            generator=torch.Generator(),
        )
        number = 0
        for number, chunk in enumerate(_joined(chunks, self._source), 1):
            if number > first:
                assert not isinstance(chunk, int)
                batch = self._normalize(*chunk)
                source, mixing = self._source, self._source.augmentation.mixing
                if mixing is not None and source.split == "train":
                    batch = mixing(*batch, mix("mixing", source.seed, epoch, source.rank, number))
                yield batch
        if number < first:
            raise SettingError(
                f"The data changed: the checkpoint was written after {first} batches, and the shards of rank {self._source.rank} now have only "
                f"{number}. Use the same shards."
            )


Chunk = tuple[Tensor, Tensor] | int  # an int stands for a complete batch that was not decoded


def _joined(chunks: Any, source: _Source) -> Iterator[Chunk]:
    """Complete batches as they come, and batches joined from the short ones."""
    rest: list[tuple[Tensor, Tensor]] = []
    for chunk in chunks:
        if isinstance(chunk, _Unreadable):
            raise SettingError(
                f"The shard {chunk.shard} {chunk.reason}. Repair, replace or remove it and resume; Halfstep does not substitute other "
                "examples."
            )
        if isinstance(chunk, int) or len(chunk[1]) == source.batch_size:
            yield chunk
            continue
        rest.append(tuple(chunk))
        pixels, labels = (torch.cat(parts) for parts in zip(*rest, strict=True))
        if len(labels) >= source.batch_size:
            yield pixels[: source.batch_size], labels[: source.batch_size]
            pixels, labels = pixels[source.batch_size :], labels[source.batch_size :]
        rest = [(pixels, labels)]
    if source.split == "val" and rest and len(rest[0][1]):
        yield rest[0]


@dataclass(frozen=True)
class _Source:
    """What a worker reads."""

    shards: Shards
    split: str
    batch_size: int
    image_size: int
    shuffle: int
    seed: int
    rank: int
    world_size: int
    augmentation: Augmentation

    @property
    def by_example(self) -> bool:
        """Whether ranks divide the examples instead of the shards: validation with fewer shards than ranks."""
        return len(self.shards.files[self.split]) < self.world_size

    def files(self, epoch: int, worker: int, num_workers: int) -> list[str]:
        """The shards of one worker of this rank."""
        files = list(self.shards.files[self.split])
        if self.split == "train":
            random.Random(mix("shards", self.seed, epoch)).shuffle(files)  # noqa: S311 - not for secrets
        own = files if self.by_example else files[self.rank :: self.world_size]
        return own[worker::num_workers]


class _Unreadable(Exception):
    """A shard that cannot be read, or an example in it."""

    def __init__(self, shard: str, reason: str) -> None:
        super().__init__(shard, reason)
        self.shard, self.reason = shard, reason


class _Reader(IterableDataset[Any]):
    """One epoch of the examples of a worker, in batches; the first `skipped` are not decoded."""

    def __init__(self, source: _Source, epoch: int, *, skipped: int) -> None:
        self._source, self._epoch, self._skipped = source, epoch, skipped

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._chunks()
        except _Unreadable as problem:
            yield problem

    def _chunks(self) -> Iterator[Chunk]:
        source, info = self._source, get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        examples = _read(source.files(self._epoch, worker, num_workers))
        if source.by_example:
            examples = (each for number, each in enumerate(examples) if number % source.world_size == source.rank)
        if source.split == "train":
            draw = random.Random(mix("buffer", source.seed, self._epoch, source.rank, worker))  # noqa: S311 - not for secrets
            examples = require_webdataset("filters").shuffle(source.shuffle, initial=source.shuffle, rng=draw)(examples)
        chunk: list[dict[str, Any]] = []
        number = 0
        for example in examples:
            chunk.append(example)
            if len(chunk) == source.batch_size:
                yield number if number < self._skipped else self._decoded(chunk)
                chunk, number = [], number + 1
        if chunk:
            yield self._decoded(chunk)

    def _decoded(self, examples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        source = self._source
        pixels = np.empty((len(examples), source.image_size, source.image_size, 3), dtype=np.uint8)
        labels = [_label(example, source.shards) for example in examples]
        for index, example in enumerate(examples):
            key = next((key for key in IMAGE_KEYS if key in example), None)
            if key is None:
                raise _problem(example, f"has no image: none of {', '.join(IMAGE_KEYS)} is among {_keys(example)}")
            place = (Path(example["__url__"]).name, example["__key__"])
            train = source.split == "train"
            draw = random.Random(mix("crop", source.seed, self._epoch, *place)) if train else None  # noqa: S311
            try:
                pixels[index] = decode(example[key], source.image_size, draw, source.augmentation)
            except Exception as error:  # Pillow's plugins raise almost anything on a damaged file
                raise _problem(
                    example, f"cannot be decoded ({key}): {decoding_problem(error, is_empty=not example[key])}"
                ) from error
        return torch.from_numpy(pixels), torch.tensor(labels)


def _read(files: list[str]) -> Iterator[dict[str, Any]]:
    """The examples of shards, in order: dicts of file contents by suffix, with `__key__` and `__url__`."""
    tars = require_webdataset("tariterators")
    for file in files:
        last = None
        try:
            with Path(file).open("rb") as stream:
                for example in tars.group_by_keys(tars.tar_file_expander([{"url": file, "stream": stream}])):
                    last = example["__key__"]
                    yield example
                if file.endswith(".tar"):
                    _check_end(file, stream, last)
        except (OSError, ValueError, EOFError, tars.tarfile.TarError) as error:
            after = "near its start" if last is None else f"after the example {last!r}"
            text = str(error.args[0]) if error.args else ""
            raise _Unreadable(file, f"cannot be read {after}: {type(error).__name__}: {text}") from error


def _check_end(file: str, stream: Any, last: str | None) -> None:
    while content := stream.read(_READ_BYTES):
        if any(content):
            raise _Unreadable(
                file, f"has a damaged header after the example {last!r}: data follows where the archive seems to end"
            )


def _label(example: dict[str, Any], shards: Shards) -> int:
    if LABEL_KEY not in example:
        raise _problem(example, f"has no label: {LABEL_KEY} is not among {_keys(example)}")
    text = example[LABEL_KEY]
    try:
        label = int(text)
    except ValueError:
        raise _problem(example, f"has the label {text[:20]!r} in {LABEL_KEY}, which is not an integer") from None
    if not 0 <= label < shards.num_classes:
        raise _problem(
            example,
            f"has the label {label}, but {shards.classes_from}; write one class name per line into {CLASSES} next to the shards",
        )
    return label


def _problem(example: dict[str, Any], reason: str) -> _Unreadable:
    return _Unreadable(example["__url__"], f"is damaged or incomplete: the example {example['__key__']!r} {reason}")


def _keys(example: dict[str, Any]) -> str:
    return ", ".join(sorted(key for key in example if not key.startswith("__"))) or "nothing"
