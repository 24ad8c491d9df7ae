"""The manifest of a checkpoint, and the checks that detect missing, damaged and foreign files.

The manifest contains the size and SHA-256 of the other files and a checksum of itself: `manifest_sha256` is the
SHA-256 of the manifest's own bytes with the 64 digits of that field written as zeros. The rule does not depend on
the rest of the format, so a newer version can be distinguished from a damaged file. This module does not need torch:
a command can inspect a checkpoint without loading it.

A checkpoint of one process has the files of `FILES` and version 1. One that several ranks wrote together (`sharded.py`) has
version 2, an index, and three files of each rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import SettingError

__all__ = [
    "FILES",
    "FORMAT",
    "OWN_OF_RANKS",
    "SHARDED_VERSION",
    "VERSION",
    "RankFiles",
    "is_checkpoint_file",
    "num_ranks_of",
    "read_manifest",
    "render_manifest",
    "require_intact",
    "require_present",
]

FORMAT = "halfstep-checkpoint"
VERSION = 1
SHARDED_VERSION = 2
FILES = ("model.safetensors", "state.safetensors", "state.json", "meta.json")
# A key of state.json: what each of several ranks with the same tensors has for itself.
OWN_OF_RANKS = "halfstep-own-of-ranks"
_SHARED_FILES = ("index.json", "state.json", "meta.json")  # of a sharded checkpoint: those that rank 0 writes
_OF_RANK = re.compile(r"(?:(?:model|state|rank)-(\d{5,})-of-(\d{5,})\.safetensors|rank-(\d{5,})-of-(\d{5,})\.json)")
_SELF = re.compile(rb'("manifest_sha256": ")([0-9a-f]{64})(")')
_ZEROS = b"0" * 64
_PICKLES = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".distcp", ".tar"}
_BLOCK = 8 * 2**20
_AGAIN = "Copy the checkpoint again from an intact source, or load an earlier one."


@dataclass(frozen=True)
class RankFiles:
    """The names of the files that one rank of a sharded checkpoint writes."""

    model: str  # its slices of the weights
    state: str  # its slices of the state
    own: str  # tensors of its own, such as the states of its random generators
    tree: str  # the tree that contains those

    @classmethod
    def of(cls, rank: int, num_ranks: int) -> RankFiles:
        """The names for a rank."""
        number = f"{rank:05d}-of-{num_ranks:05d}"
        model, state, own = (f"{part}-{number}.safetensors" for part in ("model", "state", "rank"))
        return cls(model, state, own, f"rank-{number}.json")


def is_checkpoint_file(name: str) -> bool:
    """Whether a checkpoint directory may have a file of this name, apart from its score."""
    return name in {*FILES, *_SHARED_FILES, "manifest.json"} or _OF_RANK.fullmatch(name) is not None


def num_ranks_of(files: Iterable[str]) -> int | None:
    """The number of ranks that wrote these files; None if they are those of one process."""
    names = set(files)
    trees = [name for name in names if name.startswith("rank-") and name.endswith(".json")]
    return len(trees) if "index.json" in names else None


def render_manifest(files: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The bytes of a manifest for those files (name to `bytes` and `sha256`), its own checksum included."""
    version = VERSION if num_ranks_of(files) is None else SHARDED_VERSION
    document = {"format": FORMAT, "version": version, "files": files, "manifest_sha256": _ZEROS.decode()}
    blank = json.dumps(document, indent=1).encode() + b"\n"
    return blank.replace(_ZEROS, hashlib.sha256(blank).hexdigest().encode())


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """The files of the checkpoint at `path`, each with its `bytes` and `sha256`; raises if it is not a checkpoint."""
    file = path / "manifest.json"
    try:
        if not path.is_dir():
            raise _not_a_folder(path)
        if not file.is_file():
            raise _no_manifest(path)
        raw = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error
    checksums = _SELF.findall(raw)
    if (
        len(checksums) != 1
        or hashlib.sha256(_SELF.sub(rb"\g<1>" + _ZEROS + rb"\g<3>", raw)).hexdigest().encode() != checksums[0][1]
    ):
        if FORMAT.encode() not in raw and not any((path / name).exists() for name in (*FILES, "index.json")):
            raise SettingError(f"{path} is not a Halfstep checkpoint: its manifest.json was written by something else.")
        raise SettingError(
            f"{file} was altered or truncated: its {len(raw)} bytes do not match the checksum in it. {_AGAIN}"
        )
    document = json.loads(raw)
    name, version = document.get("format"), document.get("version")
    if name != FORMAT or not isinstance(version, int):
        raise SettingError(f"{path} is not a Halfstep checkpoint: its manifest.json has the format {name!r}.")
    if version > SHARDED_VERSION:
        raise SettingError(
            f"{path} has format version {version}, but this Halfstep reads at most {SHARDED_VERSION}; upgrade halfstep."
        )
    files: dict[str, dict[str, Any]] = document["files"]
    expected = _expected_files(files)
    if set(files) != expected:
        raise SettingError(
            f"{file} lists the files {sorted(files)} instead of {sorted(expected)}; save the checkpoint again."
        )
    return files


def _expected_files(files: Iterable[str]) -> set[str]:
    """What a manifest must list, judging by how many ranks wrote it."""
    num_ranks = num_ranks_of(files)
    if num_ranks is None:
        return set(FILES)
    of_ranks = (dataclasses.astuple(RankFiles.of(rank, num_ranks)) for rank in range(num_ranks))
    return {*_SHARED_FILES, *itertools.chain(*of_ranks)}


def require_present(path: Path, manifest: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise if a file of the checkpoint is missing or does not have the size in the manifest."""
    for name, expected in manifest.items():
        file = path / name
        if not file.is_file():
            raise SettingError(f"{file} is missing: the checkpoint is incomplete. {_AGAIN}")
        size = file.stat().st_size
        if size < expected["bytes"]:
            raise SettingError(f"{file} is truncated: it has {size} bytes of {expected['bytes']}. {_AGAIN}")
        if size > expected["bytes"]:
            raise SettingError(
                f"{file} has grown: it has {size} bytes and was saved with {expected['bytes']}. {_AGAIN}"
            )


def require_intact(path: Path, manifest: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Raise if the bytes of the file called `name` are not those that were saved."""
    digest = hashlib.sha256()
    try:
        with (path / name).open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise _unreadable(path / name, error) from error
    if digest.hexdigest() != manifest[name]["sha256"]:
        raise SettingError(
            f"{path / name} was altered: its SHA-256 is {digest.hexdigest()[:16]}... but the manifest has "
            f"{manifest[name]['sha256'][:16]}.... {_AGAIN}"
        )


def _unreadable(file: Path, error: OSError) -> SettingError:
    return SettingError(f"{file} cannot be read: {error.strerror or error}. Check its permissions and the disk.")


def _not_a_folder(path: Path) -> SettingError:
    if not path.exists():
        return SettingError(f"There is no checkpoint at {path}; check the path, or list the folder it is in.")
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith((b"PK\x03\x04", b"\x80")) or path.suffix in _PICKLES:
        return _pickled(path, path.name)
    advice = "a checkpoint is a directory with a manifest.json in it"
    if is_checkpoint_file(path.name):
        advice = f"pass its directory, {path.parent}"
    elif path.suffix == ".safetensors":
        advice = "load a single file of weights with safetensors.torch.load_file"
    return SettingError(f"{path} is a file, not a Halfstep checkpoint; {advice}.")


def _no_manifest(path: Path) -> SettingError:
    names = sorted(entry.name for entry in path.iterdir())
    if any(is_checkpoint_file(name) for name in names):
        return SettingError(f"{path / 'manifest.json'} is missing: the checkpoint is incomplete. {_AGAIN}")
    pickled = [name for name in names if Path(name).suffix in _PICKLES or name == ".metadata"]
    if pickled:
        return _pickled(path, pickled[0])
    if within := [name for name in names if (path / name / "manifest.json").is_file()]:
        return SettingError(f"{path} is a folder of checkpoints; pass one of them, such as {path / within[-1]}.")
    return SettingError(
        f"{path} is not a Halfstep checkpoint: it has no manifest.json. It contains {names[:5] or 'nothing'}."
    )


def _pickled(path: Path, name: str) -> SettingError:
    return SettingError(
        f"{path} is not a Halfstep checkpoint: {name} looks like a pickle, as written by torch.save and DeepSpeed, and "
        "loading a pickle can execute code. Halfstep never opens one. If you trust it, load it yourself with "
        "torch.load(..., weights_only=True) and save it with halfstep.checkpoint.directory.save_checkpoint."
    )
