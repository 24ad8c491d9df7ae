"""A checkpoint on disk: written atomically, verified on load, never a pickle.

A checkpoint is a directory of five files:

    model.safetensors   the weights, under the model's own names; tied tensors once
    state.safetensors   all other tensors: optimizer, scaler, random generators
    state.json          the tree that contains those tensors (see `tree.py`)
    meta.json           a description: step, policy, truth table; and which weights are tied
    manifest.json       format, version, the size and SHA-256 of each file, and a checksum of the manifest itself

How saving is atomic. Everything is written to a temporary directory in the same parent and synced to disk: each file,
then the directory. One rename then moves it into place, and the parent is synced. A process that dies at any moment
leaves either nothing or the complete checkpoint, and at worst a `.tmp-*` directory that nothing reads. A checkpoint that
is overwritten changes places with the new one once that is complete (`exchange.py`), and is removed after that.

How damage is detected. Loading checks the manifest against its own checksum and every file against the manifest before
anything is parsed, so a flipped bit anywhere raises an error that names the file. The checksums detect accidents; they
do not prove who wrote the files. The protection against a hostile file is that nothing in it is ever executed.
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

from halfstep.checkpoint.exchange import exchange
from halfstep.checkpoint.files import (
    FILES,
    FORMAT,
    VERSION,
    read_manifest,
    render_manifest,
    require_intact,
    require_present,
)
from halfstep.checkpoint.names import match_names
from halfstep.checkpoint.tensorfile import TensorReader, file_bytes, require_storable, tensor_blocks, view_key
from halfstep.checkpoint.tree import tree_from_json, tree_to_json
from halfstep.errors import HalfstepError, SettingError
from halfstep.hardware.units import bytes_text, few

__all__ = [
    "TEMPORARY",
    "Checkpoint",
    "check_weights",
    "folder_lock",
    "load_checkpoint",
    "read_meta",
    "replaced",
    "save_checkpoint",
]

TEMPORARY = ".tmp-"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The verified contents of a checkpoint."""

    weights: dict[str, Tensor]
    state: Any
    meta: dict[str, Any]
    path: Path

    def __str__(self) -> str:
        num_params = sum(w.numel() for w in self.weights.values())
        return f"checkpoint {self.path} ({len(self.weights)} tensors, {num_params} values)"


def save_checkpoint(
    path: str | Path,
    *,
    weights: Mapping[str, Tensor],
    state: Any,
    meta: Mapping[str, Any],
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint to `path` and return the path; with `overwrite`, a checkpoint that is there is replaced.

    `state` is any tree of dicts, lists, tuples, tensors and plain values; `meta` the same without tensors. A value
    that cannot be stored raises an error with its path before anything is written. If writing fails, the partial
    checkpoint is removed and the error gives the reason.
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
        _check_target(path, overwrite=overwrite)
        _write(path, files)
    except OSError as error:
        raise _cannot_save(path, error, needed) from error
    return path


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read the checkpoint at `path` after verifying every byte of it.

    The weights are loaded to `device`. So are the tensors of the state, except those that were on the CPU when they
    were saved, such as the states of random generators.
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
        raise _unexpected_layout(path / "meta.json") from None
    return Checkpoint(weights, state, _build(path / "meta.json", "meta", _no_tensor), path)


def read_meta(path: str | Path) -> dict[str, Any]:
    """Read only the meta of the checkpoint at `path`; checks the sizes of all files and the bytes of meta.json."""
    path = Path(path)
    manifest = read_manifest(path)
    require_present(path, manifest)
    require_intact(path, manifest, "meta.json")
    meta: dict[str, Any] = _build(path / "meta.json", "meta", _no_tensor)
    return meta


def check_weights(
    saved: Mapping[str, Tensor], model: Mapping[str, Tensor], *, any_float: bool = False
) -> dict[str, Tensor]:
    """The saved weights under the model's names, for `load_state_dict`; raises an error that lists every mismatch.

    `model` is the model's `state_dict()`; wrappers in its names or in the saved ones do not matter. With `any_float`,
    floating-point tensors may differ in dtype.
    """
    own = match_names(saved, model)
    actual, expected = {own.get(name, name): tensor for name, tensor in saved.items()}, model
    different = [
        f"{name} (saved {_shape_and_dtype(actual[name])}, model {_shape_and_dtype(expected[name])})"
        for name in expected
        if name in actual and not _matches(actual[name], expected[name], any_float=any_float)
    ]
    mismatches = {
        "missing in the checkpoint": [name for name in expected if name not in actual],
        "not in the model": [name for name in actual if name not in expected],
        "different": different,
    }
    if any(mismatches.values()):
        listed = "; ".join(f"{len(names)} {kind}: {few(names, 5)}" for kind, names in mismatches.items() if names)
        raise SettingError(
            f"The checkpoint does not fit the model: {listed}. Build the model with the settings it was saved with; "
            "they are in the checkpoint's meta."
        )
    return {name: actual[name] for name in model}


def replaced(weights: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of `weights` with the values of `new`; a tied weight is replaced under all of its names."""
    own = match_names(new, weights)
    by_view = {view_key(weights[own.get(name, name)]): tensor for name, tensor in new.items()}
    return {name: by_view.get(view_key(tensor), tensor) for name, tensor in weights.items()}


@contextmanager
def folder_lock(folder: Path, *, exclusive: bool) -> Iterator[bool]:
    """Lock a folder for saving into it (shared) or cleaning it up (exclusive); yields whether that is allowed.

    The lock ends with its process, so a killed save leaves none behind. Without file locks (Windows, some network
    filesystems) saving is allowed and cleaning up is not.
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
    """The weights, tied ones once, and a map from each other name to the stored one."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    name_of_view: dict[tuple[object, ...], str] = {}
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            raise SettingError(f"weights[{name!r}] is a {type(tensor).__name__}, not a tensor; put it into state.")
        require_storable(tensor, f"weights[{name!r}]")
        if name == "__metadata__" or name.encode("utf-8", "replace").decode() != name:
            raise SettingError(f"weights[{name!r}]: a safetensors file cannot store a tensor of that name; rename it.")
        first = name_of_view.setdefault(view_key(tensor), name)
        if first == name:
            stored[name] = tensor
        else:
            aliases[name] = first
    return stored, aliases


def _check_target(path: Path, *, overwrite: bool) -> None:
    """Raise where writing to `path` would destroy something: only a checkpoint may be overwritten, and only on request."""
    if not os.path.lexists(path):
        return
    entries = None if path.is_symlink() or not path.is_dir() else sorted(entry.name for entry in path.iterdir())
    if entries == []:
        return
    if not overwrite:
        raise SettingError(
            f"{path} exists already and is not overwritten; save under another name, remove it first, or pass overwrite=True."
        )
    if entries is None or "manifest.json" not in entries or not set(entries) <= {*FILES, "manifest.json"}:
        foreign = (
            "" if entries is None else f" (it has {few([name for name in entries if name not in FILES] or entries)})"
        )
        raise SettingError(
            f"{path} is not a checkpoint directory{foreign}, and overwrite=True replaces nothing else; save under another name."
        )


def _write(path: Path, files: Mapping[str, Iterable[bytes | memoryview]]) -> None:
    """Write the files and their manifest to a temporary directory, sync it, and rename it into place."""
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
            overwritten = path.is_dir() and any(path.iterdir())
            (exchange if overwritten else Path.replace)(aside, path)
            try:
                _sync(parent)
            except BaseException:
                exchange(aside, path) if overwritten else path.rename(aside)
                raise
            if overwritten:
                shutil.rmtree(aside, ignore_errors=True)
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
            del block  # it keeps the copy of a tensor alive
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


def _sync(folder: Path) -> None:
    """Make the entries of a folder durable; Windows has no such call and needs none."""
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
        free = f"{bytes_text(shutil.disk_usage(path.parent).free)} are free"
    except OSError:
        free = "the free space is unknown"
    return HalfstepError(
        f"The checkpoint {path} could not be saved: {error.strerror or error}. It needs {bytes_text(needed)} and {free} in "
        f"{path.parent}. The partial checkpoint was removed and earlier ones are untouched; free disk space, check the "
        "write permission, or save to another folder."
    )


def _render(document: dict[str, Any]) -> bytes:
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _parse(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise _unexpected_layout(path) from None
    return document


def _build(path: Path, field: str, tensor: Any) -> Any:
    document = _parse(path)
    try:
        return tree_from_json(document[field], tensor)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SettingError):
            raise
        raise _unexpected_layout(path) from None


def _no_tensor(name: str, kind: str) -> Tensor:
    raise KeyError(name, kind)


def _unexpected_layout(path: Path) -> SettingError:
    return SettingError(
        f"{path} does not have the layout of {FORMAT} version {VERSION}; save the checkpoint again with Halfstep."
    )


def _matches(saved: Tensor, expected: Tensor, *, any_float: bool) -> bool:
    if any_float and saved.is_floating_point() and expected.is_floating_point():
        return saved.shape == expected.shape
    return _shape_and_dtype(saved) == _shape_and_dtype(expected)


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
