"""WebDataset shards on disk: tar files of images and labels, found by folder or pattern.

    DIR                          DIR/train/*.tar and DIR/val/*.tar, or DIR/*train*.tar and DIR/*val*.tar
    /data/in-train-{000..146}.tar::/data/in-val-{00..06}.tar
                                 brace and glob patterns, several joined by `::`, as webdataset writes them

The name of a file, or else of its folder, shows its split: it contains `train`, `val`, `valid` or `validation` as a word.
Without validation shards the job is not validated. The number of classes is the number of lines of `classes.txt`, next to the
shards or in the folder above, and ImageNet's 1,000 without one: reading all labels first would be a pass over all the data.

Only files on this machine are read: webdataset's `pipe:` URLs run a command of the shell, and a run file that is resumed must
not do that.
"""

from __future__ import annotations

import glob
import importlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import MissingError, SettingError

__all__ = ["Shards", "find_shards", "has_shards", "require_webdataset"]

NUM_CLASSES = 1000  # ImageNet's
CLASSES = "classes.txt"
JOIN = "::"
_SUFFIXES = (".tar", ".tar.gz", ".tgz")
_SPLIT = re.compile(r"(?<![a-z])(train|val|valid|validation)(?![a-z])")


@dataclass(frozen=True)
class Shards:
    """The shards of each split, sorted, and the number of classes."""

    files: dict[str, tuple[str, ...]]
    num_classes: int
    classes_from: str  # where the number of classes comes from


def has_shards(source: str) -> bool:
    """Whether a data source is a pattern of tar files or a folder with some."""
    if JOIN in source or source.endswith(_SUFFIXES):
        return True
    return any(_tars(Path(source) / part) for part in ("", "train"))


def find_shards(source: str) -> Shards:
    """List the shards of a folder or a pattern; nothing is opened."""
    root = Path(source)
    folders = (root, root / "train", root / "val")
    paths = [path for folder in folders for path in _tars(folder)] if root.is_dir() else _expand(source)
    files: dict[str, list[str]] = {"train": [], "val": []}
    for path in paths:
        files[_split_of(path)].append(path)
    if not files["train"]:
        raise SettingError(
            f"--data {source} has no training shards: the name of a shard, or of its folder, must contain train or val "
            f"(there are {len(files['val'])} validation shards)."
        )
    for split, names in files.items():
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SettingError(f"--data {source} names the {split} shard {twice} twice; remove one of the patterns.")
    return Shards(
        {split: tuple(sorted(names)) for split, names in files.items()}, *_num_classes(Path(files["train"][0]).parent)
    )


def _tars(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(entry.path for entry in os.scandir(folder) if entry.is_file() and entry.name.endswith(_SUFFIXES))


def _expand(source: str) -> list[str]:
    """The files of a pattern; raises for one that names no file."""
    paths: list[str] = []
    for part in source.split(JOIN):
        if is_remote(part):
            raise SettingError(
                f"--data {part} is not a file on this machine, and Halfstep reads no others; download or mount the shards."
            )
        for name in require_webdataset("shardlists").expand_urls(part):
            matches = sorted(glob.glob(name)) if glob.has_magic(name) else [name]  # noqa: PTH207 - patterns are absolute
            missing = [path for path in matches if not Path(path).is_file()] if matches else [name]
            if missing:
                raise SettingError(f"The shard {missing[0]} of --data {part} does not exist; check the pattern.")
            paths += matches
    return paths


def is_remote(part: str) -> bool:
    """Whether a part of a pattern is a URL or a command rather than a path."""
    return re.match(r"[a-z0-9+]+:", part, re.IGNORECASE) is not None


def _split_of(path: str) -> str:
    for name in (Path(path).name, Path(path).parent.name):
        words = _SPLIT.findall(name.lower())
        if words:
            return "train" if words[-1] == "train" else "val"
    raise SettingError(
        f"The split of the shard {path} is not known: its name, or that of its folder, must contain train or val; rename it."
    )


def _num_classes(folder: Path) -> tuple[int, str]:
    for path in (folder / CLASSES, folder.parent / CLASSES):
        if path.is_file():
            num_classes = len(path.read_text().split("\n")) - path.read_text().endswith("\n")
            return num_classes, f"{path} has {num_classes} lines"
    return NUM_CLASSES, f"there is no {CLASSES} next to the shards, so there are {NUM_CLASSES} classes"


def require_webdataset(module: str) -> Any:
    """A module of the package webdataset."""
    try:
        return importlib.import_module(f"webdataset.{module}")
    except ImportError as error:
        raise MissingError(
            f'Reading shards needs webdataset ({error}); install it with: pip install "halfstep[vision]"'
        ) from error
