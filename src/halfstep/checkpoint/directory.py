"""A checkpoint on disk: whole or absent, and never a pickle.

A checkpoint is a directory of five files:

    model.safetensors   the weights, under the model's own names; tied tensors once
    state.safetensors   the tensors of everything else: optimizer, scaler, random generators
    state.json          the tree those tensors hang in (see `tree.py`)
    meta.json           what describes the checkpoint: step, policy, truth table; and which weights are tied
    manifest.json       format, version, and the size and SHA-256 of each file, with a checksum of its own

How it stays whole. Everything is written into a directory aside, in the same parent, and synced to the disk: each
file, then the directory. Then one rename puts it in place, and the parent is synced. A process that dies at any
moment leaves either nothing or the whole checkpoint, and at worst a `.tmp-*` directory that nobody reads.

How damage is found. Loading checks the manifest against its own checksum and every file against the manifest before
anything is parsed, so a flipped bit anywhere is an error that names the file. The checksums find accidents; they do
not prove who wrote the files. What protects against a hostile file is that nothing in it is ever executed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.checkpoint.files import FORMAT, VERSION, read_manifest, render_manifest, require_intact, require_present
from halfstep.checkpoint.tensorfile import TensorReader, file_bytes, require_storable, tensor_blocks, view_key
from halfstep.checkpoint.tree import tree_from_json, tree_to_json
from halfstep.errors import HalfstepError, SettingError

__all__ = [
    "TEMPORARY",
    "Checkpoint",
    "check_weights",
    "clean_name",
    "folder_lock",
    "load_checkpoint",
    "read_meta",
    "replaced",
    "save_checkpoint",
]

TEMPORARY = ".tmp-"
# DDP and DataParallel, torch.compile, FSDP1 and activation checkpointing each put a level of this name in between.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a checkpoint holds, verified."""

    weights: dict[str, Tensor]
    state: Any
    meta: dict[str, Any]
    path: Path

    def __str__(self) -> str:
        num_params = sum(w.numel() for w in self.weights.values())
        return f"checkpoint {self.path} ({len(self.weights)} tensors, {num_params} values)"


def clean_name(name: str) -> str:
    """The model's own name of a weight: without the levels that DDP, FSDP and torch.compile put in between."""
    *levels, last = name.split(".")
    return ".".join([*(level for level in levels if level not in _WRAPPERS), last])


def save_checkpoint(path: str | Path, *, weights: Mapping[str, Tensor], state: Any, meta: Mapping[str, Any]) -> Path:
    """Write a checkpoint to `path`, which must not exist yet, and return the path.

    `state` is any tree of dicts, lists, tuples, tensors and plain values; `meta` the same without tensors. What
    cannot be stored is refused by its name before anything is written. If writing fails, what was written is
    removed and the error says why.
    """
    path = Path(path)
    stored, aliases = _untied(weights)
    state_node, state_tensors = tree_to_json(state, "state")
    meta_node, meta_tensors = tree_to_json(dict(meta), "meta")
    if meta_tensors:
        raise SettingError(
            f"meta.{next(iter(meta_tensors))} is a tensor; put tensors into state, or use .item() or .tolist()."
        )
    files: dict[str, Iterable[bytes | memoryview]] = {
        "model.safetensors": tensor_blocks(stored),
        "state.safetensors": tensor_blocks(state_tensors),
        "state.json": [_render({"version": VERSION, "state": state_node})],
        "meta.json": [_render({"version": VERSION, "aliases": aliases, "meta": meta_node})],
    }
    needed = file_bytes(stored) + file_bytes(state_tensors)
    try:
        if os.path.lexists(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir())):
            raise SettingError(
                f"{path} exists already and is not replaced; save under another name, or remove it first."
            )
        _write(path, files)
    except OSError as error:
        raise _cannot_save(path, error, needed) from error
    return path


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read the checkpoint at `path` after verifying every byte of it.

    The weights go to `device`. A tensor of the state goes there too unless it lived on the CPU when it was saved,
    as the states of random generators do.
    """
    path = Path(path)
    manifest = read_manifest(path)
    require_present(path, manifest)
    for name in manifest:
        require_intact(path, manifest, name)
    document = _parse(path / "meta.json")
    with TensorReader(path / "model.safetensors") as reader:
        weights = {name: reader.read(name, device) for name in reader}
    with TensorReader(path / "state.safetensors") as reader:
        state = _build(
            path / "state.json", "state", lambda name, kind: reader.read(name, device if kind != "cpu" else "cpu")
        )
    try:
        weights |= {alias: weights[name] for alias, name in document["aliases"].items()}
    except (KeyError, TypeError, AttributeError):
        raise _foreign(path / "meta.json") from None
    return Checkpoint(weights, state, _build(path / "meta.json", "meta", _no_tensor), path)


def read_meta(path: str | Path) -> dict[str, Any]:
    """The meta of the checkpoint at `path`, without its tensors: checks all sizes, and the bytes of meta.json."""
    path = Path(path)
    manifest = read_manifest(path)
    require_present(path, manifest)
    require_intact(path, manifest, "meta.json")
    meta: dict[str, Any] = _build(path / "meta.json", "meta", _no_tensor)
    return meta


def check_weights(
    saved: Mapping[str, Tensor], model: Mapping[str, Tensor], *, any_float: bool = False
) -> dict[str, Tensor]:
    """The saved weights under the model's names, for `load_state_dict`; refuses any that do not fit, listing them.

    `model` is the model's `state_dict()`; names are compared after `clean_name`. With `any_float` one floating dtype may
    stand for another.
    """
    have = {clean_name(name): tensor for name, tensor in saved.items()}
    want = {clean_name(name): tensor for name, tensor in model.items()}
    different = [
        f"{name} (saved {_form(have[name])}, model {_form(want[name])})"
        for name in want
        if name in have and not _fits(have[name], want[name], any_float=any_float)
    ]
    faults = {
        "missing in the checkpoint": [name for name in want if name not in have],
        "not in the model": [name for name in have if name not in want],
        "different": different,
    }
    if any(faults.values()):
        listed = "; ".join(f"{len(names)} {what}: {_first(names)}" for what, names in faults.items() if names)
        raise SettingError(
            f"The checkpoint does not fit the model: {listed}. Build the model with the settings it was saved with; "
            "the checkpoint's meta has them."
        )
    return {name: have[clean_name(name)] for name in model}


def replaced(weights: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with those of `new` in their places; a tied one is replaced under all of its names."""
    places = {view_key(weights[clean_name(name)]): tensor for name, tensor in new.items()}
    return {name: places.get(view_key(tensor), tensor) for name, tensor in weights.items()}


@contextmanager
def folder_lock(folder: Path, *, exclusive: bool) -> Iterator[bool]:
    """Hold a folder while saving into it (shared) or clearing it (exclusive); yields whether that is allowed.

    The lock dies with its process, so a killed save leaves none behind. Where there is no such lock (Windows, some
    network filesystems) saving is allowed and clearing is not.
    """
    if sys.platform == "win32":
        yield not exclusive
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError:
            yield not exclusive
        else:
            yield True
    finally:
        os.close(handle)


def _untied(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights under clean names, each memory once, and the other names of those that have several."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    origin: dict[str, str] = {}
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            raise SettingError(f"weights[{name!r}] is a {type(tensor).__name__}, not a tensor; put it into state.")
        require_storable(tensor, f"weights[{name!r}]")
        clean = clean_name(name)
        if clean == "__metadata__" or clean.encode("utf-8", "replace").decode() != clean:
            raise SettingError(f"weights[{name!r}]: a safetensors file cannot hold a tensor of that name; rename it.")
        key = view_key(tensor)
        if clean in origin:
            if first.get(key) == aliases.get(clean, clean):
                continue  # one tensor, seen through the wrapper and without it
            raise SettingError(
                f"weights {origin[clean]!r} and {name!r} are different tensors, but both are {clean!r} without the "
                "levels of DDP, FSDP or torch.compile. Pass the weights of the model or of its wrapper, not of "
                "both, or rename the submodule."
            )
        origin[clean] = name
        if key in first:
            aliases[clean] = first[key]
        else:
            first[key] = clean
            stored[clean] = tensor
    return stored, aliases


def _write(path: Path, files: Mapping[str, Iterable[bytes | memoryview]]) -> None:
    """Write the files and their manifest aside, sync them, and put them in place with one rename."""
    parent = path.parent
    if not parent.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        _sync(parent.parent)
    aside = parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    with folder_lock(parent, exclusive=False):
        try:
            aside.mkdir()
            manifest = {name: _write_file(aside / name, blocks) for name, blocks in files.items()}
            _write_file(aside / "manifest.json", [render_manifest(manifest)])
            _sync(aside)
            aside.replace(path)
            try:
                _sync(parent)
            except BaseException:
                path.rename(aside)
                raise
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def _write_file(path: Path, blocks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("xb") as file:
        for block in blocks:
            file.write(block)
            digest.update(block)
            num_bytes += len(block)
            del block  # it holds on to the copy of a tensor
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


def _sync(folder: Path) -> None:
    """Make the names in a folder durable; Windows has no such call and does it by itself."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some network filesystems cannot sync a folder
                raise
        finally:
            os.close(handle)


def _cannot_save(path: Path, error: OSError, needed: int) -> HalfstepError:
    try:
        free = f"{shutil.disk_usage(path.parent).free} are free"
    except OSError:
        free = "how many are free is not known"
    return HalfstepError(
        f"The checkpoint {path} could not be saved: {error.strerror or error}. It needs {needed} bytes and {free} in "
        f"{path.parent}. What was written of it is removed and earlier checkpoints are untouched; make room or write "
        "permission there, or save to another folder."
    )


def _render(document: dict[str, Any]) -> bytes:
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _parse(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise _foreign(path) from None
    return document


def _build(path: Path, field: str, tensor: Any) -> Any:
    document = _parse(path)
    try:
        return tree_from_json(document[field], tensor)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SettingError):
            raise
        raise _foreign(path) from None


def _no_tensor(name: str, kind: str) -> Tensor:
    raise KeyError(name, kind)


def _foreign(path: Path) -> SettingError:
    return SettingError(
        f"{path} is not what {FORMAT} version {VERSION} says it should be; save the checkpoint again with Halfstep."
    )


def _fits(saved: Tensor, wanted: Tensor, *, any_float: bool) -> bool:
    if any_float and saved.is_floating_point() and wanted.is_floating_point():
        return saved.shape == wanted.shape
    return _form(saved) == _form(wanted)


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _first(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
