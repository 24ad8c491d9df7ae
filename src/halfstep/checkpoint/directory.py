"""A checkpoint on disk: written atomically, verified on load, never a pickle.

A checkpoint is a directory of tensors in safetensors, the rest in JSON (`contents.py` lists the files, of one process and of
several ranks), and `manifest.json` with the format, the version, the size and SHA-256 of each file, and a checksum of the
manifest itself. It appears under its name all at once (`atomic.py`).

How damage is detected. Loading checks the manifest against its own checksum and every file against the manifest before
anything is parsed, so a flipped bit anywhere raises an error that names the file. The checksums detect accidents; they
do not prove who wrote the files. The protection against a hostile file is that nothing in it is ever executed.

How ranks are independent. `open_checkpoint` returns tensors that are read when they are needed, in parts if a rank needs
only a part, whoever wrote them: files of N ranks are read by M, and one process reads them as whole tensors. When several
ranks open a checkpoint, each verifies a share of the files, and damage that one of them detects is an error on all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.backends.ranks import Ranks
from halfstep.checkpoint.contents import checkpoint_contents, write_contents
from halfstep.checkpoint.files import (
    FORMAT,
    OWN_OF_RANKS,
    SHARDED_VERSION,
    RankFiles,
    num_ranks_of,
    read_manifest,
    require_intact,
    require_present,
)
from halfstep.checkpoint.names import match_names
from halfstep.checkpoint.stored import StoredFiles, StoredTensor, read_all, stored_slices, stored_whole
from halfstep.checkpoint.tensorfile import view_key
from halfstep.checkpoint.tree import tree_from_json
from halfstep.errors import SettingError
from halfstep.hardware.units import few

__all__ = [
    "Checkpoint",
    "check_weights",
    "load_checkpoint",
    "open_checkpoint",
    "read_meta",
    "replaced",
    "save_checkpoint",
]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The verified contents of a checkpoint; from `open_checkpoint`, tensors are `StoredTensor`s."""

    weights: dict[str, Any]
    state: Any
    meta: dict[str, Any]
    path: Path
    num_ranks: int = 1  # that wrote it together

    def __str__(self) -> str:
        num_params = sum(math.prod(w.shape) for w in self.weights.values())
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
    checkpoint is removed and the error gives the reason. For several ranks, and for saving in the background, see `Saver`.
    """
    path, alone = Path(path), Ranks()
    contents = checkpoint_contents(weights=weights, state=state, own={}, meta=meta, ranks=alone)
    write_contents(contents, path, overwrite=overwrite, ranks=alone)
    return path


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read the checkpoint at `path` after verifying every byte of it; shards are put together.

    The weights are loaded to `device`. So are the tensors of the state, except those that were on the CPU when they
    were saved, such as the states of random generators. Of what each rank has for itself, that of rank 0 is read.
    """
    with open_checkpoint(path) as checkpoint:
        weights = read_all(checkpoint.weights, lambda stored: stored.read(device=device))
        state = read_all(checkpoint.state, lambda s: s.read(device=device if s.kind != "cpu" else "cpu"))
    return replace(checkpoint, weights=weights, state=state)


@contextmanager
def open_checkpoint(path: str | Path, ranks: Ranks | None = None) -> Iterator[Checkpoint]:
    """Verify the checkpoint at `path` and yield it with `StoredTensor`s, which can be read inside this block.

    `ranks` open it together. What each rank has for itself (random-number state, data position) is that of the same rank,
    or, if another number of ranks wrote it, that of rank 0.
    """
    path, ranks = Path(path), ranks or Ranks()
    manifest = ranks.together(lambda: _verify(path, ranks))[ranks.rank]
    files = StoredFiles(path)
    try:
        yield _open(path, manifest, files, ranks)
    finally:
        files.close()


def _verify(path: Path, ranks: Ranks) -> list[str]:
    """Check all sizes and this rank's share of the bytes; returns the names of the files."""
    manifest = read_manifest(path)
    require_present(path, manifest)
    for name in sorted(manifest)[ranks.rank :: ranks.num_ranks]:
        require_intact(path, manifest, name)
    return list(manifest)


def _open(path: Path, manifest: list[str], files: StoredFiles, ranks: Ranks) -> Checkpoint:
    num_ranks = num_ranks_of(manifest)
    aliases_document = _parse(path / "meta.json")
    if num_ranks is None:
        weights = {n: stored_whole(files, "model.safetensors", n) for n in files.reader("model.safetensors")}
        state = _build(path / "state.json", "state", _from_file(files, "state.safetensors"))
        if isinstance(state, dict) and OWN_OF_RANKS in state:
            owns = state.pop(OWN_OF_RANKS)
            num_ranks = len(owns)
            state |= owns[ranks.rank if num_ranks == ranks.num_ranks else 0]
    else:
        index, own = (
            _parse(path / "index.json"),
            RankFiles.of(ranks.rank if num_ranks == ranks.num_ranks else 0, num_ranks),
        )
        try:
            weights = {name: stored_slices(files, name, entry) for name, entry in index["model"].items()}
        except (KeyError, TypeError, AttributeError):
            raise _unexpected_layout(path / "index.json") from None
        state = _build(path / "state.json", "state", _from_index(files, index))
        own_state = _build(path / own.tree, "state", _from_file(files, own.own))
        state = {**state, **own_state} if own_state else state
    try:
        weights |= {alias: weights[name] for alias, name in aliases_document["aliases"].items()}
    except (KeyError, TypeError, AttributeError):
        raise _unexpected_layout(path / "meta.json") from None
    return Checkpoint(weights, state, _build(path / "meta.json", "meta", _no_tensor), path, num_ranks or 1)


def _from_file(files: StoredFiles, file: str) -> Callable[[str, str], Any]:
    def tensor(name: str, kind: str) -> Any:
        stored = stored_whole(files, file, name, kind)
        return stored.read() if kind == "array" else stored

    return tensor


def _from_index(files: StoredFiles, index: dict[str, Any]) -> Callable[[str, str], Any]:
    def tensor(name: str, kind: str) -> StoredTensor | Tensor:
        stored = stored_slices(files, name, index["state"][name], kind)
        return stored.read() if kind == "array" else stored

    return tensor


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
        f"{path} does not have the layout of {FORMAT} version {SHARDED_VERSION} or earlier; save the checkpoint again with Halfstep."
    )


def _matches(saved: Tensor, expected: Tensor, *, any_float: bool) -> bool:
    if any_float and saved.is_floating_point() and expected.is_floating_point():
        return saved.shape == expected.shape
    return _shape_and_dtype(saved) == _shape_and_dtype(expected)


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
