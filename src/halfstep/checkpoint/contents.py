"""What one process writes of a checkpoint: tensors and documents by file, ready to be copied and written.

Building the contents needs the objects of the run and checks every value, so it happens where `save` is called. Copying
(`snapshot.py`) and writing need only the result, so they can happen later, in another thread. There are two forms. One
process writes whole tensors:

    model.safetensors   the weights, under the model's own names; tied tensors once
    state.safetensors   all other tensors: optimizer, scaler, random generators
    state.json          the tree that contains those tensors (see `tree.py`); of ranks that store the same tensors, rank 0
                        writes them, with what each rank has for itself
    meta.json           a description: step, policy, truth table; and which weights are tied

Several ranks write together, each what it stores. A tensor that all ranks have is written by rank 0, and of equal copies of
a shard (HSDP) one is written:

    model-R-of-N.safetensors   the slices of the weights that rank R stores
    state-R-of-N.safetensors   the slices of the state
    rank-R-of-N.safetensors    tensors of the rank itself: random generators, data position
    rank-R-of-N.json           the tree that contains those
    state.json, meta.json      as above, from rank 0
    index.json                 for every tensor its shape, dtype, and the slices with their files
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from halfstep.backends.ranks import Ranks
from halfstep.checkpoint.atomic import aside_of, cannot_save, check_target, publish, write_file
from halfstep.checkpoint.boxes import Box, box_of, is_first_copy
from halfstep.checkpoint.files import SHARDED_VERSION, VERSION, RankFiles, render_manifest
from halfstep.checkpoint.tensorfile import file_bytes, require_storable, tensor_blocks, view_key
from halfstep.checkpoint.tree import tree_to_json
from halfstep.errors import HalfstepError, SettingError
from halfstep.optim.shards import is_sharded, local

__all__ = ["Contents", "Part", "checkpoint_contents", "render", "write_contents"]


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor of a sharded checkpoint, and the part of it that this rank writes; None if another rank does."""

    shape: tuple[int, ...]
    dtype: str
    box: Box | None


@dataclass(frozen=True, eq=False)
class Contents:
    """The files of one process; `parts` describes the tensors of the model and the state where several ranks write."""

    tensors: dict[str, dict[str, Tensor]]
    documents: dict[str, bytes]
    parts: dict[str, dict[str, Part]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The size of all files but the index and the manifest."""
        return sum(map(file_bytes, self.tensors.values())) + sum(map(len, self.documents.values()))


def checkpoint_contents(
    *, weights: Mapping[str, Tensor], state: Any, own: Mapping[str, Any], meta: Mapping[str, Any], ranks: Ranks
) -> Contents:
    """What this process writes; raises for a value that cannot be stored, with its path.

    `state` is any tree of dicts, lists, tuples, tensors and plain values, the same on every rank but for the parts of sharded
    tensors; `own` is a dict of the same kind with what each rank has for itself; `meta` has no tensors.
    """
    stored, aliases = _untied(weights)
    meta_node, meta_tensors = tree_to_json(dict(meta), "meta")
    if meta_tensors:
        raise SettingError(
            f"meta.{next(iter(meta_tensors))} is a tensor; put tensors into state, or use .item() or .tolist()."
        )
    meta_document = {"meta.json": render({"version": VERSION, "aliases": aliases, "meta": meta_node})}
    state_node, tensors = tree_to_json({**state, **own} if own and ranks.num_ranks == 1 else state, "state")
    shared = {"state.json": render({"version": VERSION, "state": state_node})} | meta_document
    if ranks.num_ranks == 1:
        return Contents({"model.safetensors": _whole(stored), "state.safetensors": _whole(tensors)}, shared)
    names = RankFiles.of(ranks.rank, ranks.num_ranks)
    own_node, own_tensors = tree_to_json(dict(own), "state")
    parts = {"model": _parts(stored, "weights", ranks.rank), "state": _parts(tensors, "state", ranks.rank)}
    files = {
        names.model: _written(stored, parts["model"]),
        names.state: _written(tensors, parts["state"]),
        names.own: _whole(own_tensors),
    }
    documents = {names.tree: render({"version": VERSION, "state": own_node})}
    return Contents(files, documents | (shared if ranks.rank == 0 else {}), parts)


def write_contents(contents: Contents, path: Path, *, overwrite: bool, ranks: Ranks) -> None:
    """Write a checkpoint to `path`, together with the other ranks; if any of them fails, nothing appears there."""

    def reported(work: Callable[[], Any]) -> Callable[[], Any]:
        def attempt() -> Any:
            try:
                return work()
            except OSError as error:
                raise cannot_save(path, error, contents.num_bytes) from error

        return attempt

    def begin() -> str:
        check_target(path, overwrite=overwrite)
        return stack.enter_context(aside_of(path)).name

    with contextlib.ExitStack() as stack:
        aside = path.parent / ranks.on_main(reported(begin))
        written = ranks.together(reported(lambda: _write(contents, aside, ranks)))
        ranks.on_main(reported(lambda: _finish(contents, aside, path, written)))


def render(document: dict[str, Any]) -> bytes:
    """A JSON document as it is written."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _write(contents: Contents, aside: Path, ranks: Ranks) -> dict[str, Any]:
    if not aside.is_dir() and (contents.tensors or contents.documents):
        raise HalfstepError(
            f"Rank {ranks.rank} does not see {aside}, which rank 0 created: a checkpoint of several ranks needs a folder that all of "
            "them share. Save to a shared filesystem."
        )
    files = {name: write_file(aside / name, tensor_blocks(tensors)) for name, tensors in contents.tensors.items()}
    files |= {name: write_file(aside / name, [document]) for name, document in contents.documents.items()}
    boxes = {
        kind: {name: [part.box.offset, part.box.shape] for name, part in parts.items() if part.box is not None}
        for kind, parts in contents.parts.items()
    }
    return {"files": files, "boxes": boxes}


def _finish(contents: Contents, aside: Path, path: Path, written: list[dict[str, Any]]) -> None:
    """Write index and manifest and move the directory into place."""
    files = {name: record for one in written for name, record in one["files"].items()}
    for name, record in files.items():
        size = (aside / name).stat().st_size if (aside / name).exists() else None
        if size != record["bytes"]:
            raise HalfstepError(
                f"A rank wrote {record['bytes']} bytes to {aside / name}, and rank 0 sees {size}: a checkpoint of several ranks needs a "
                "folder that all of them share. Save to a shared filesystem."
            )
    if contents.parts:
        index = {kind: _index(kind, parts, written) for kind, parts in contents.parts.items()}
        document = {"version": SHARDED_VERSION, "ranks": len(written), **index}
        files["index.json"] = write_file(aside / "index.json", [render(document)])
    write_file(aside / "manifest.json", [render_manifest(files)])
    publish(aside, path)


def _index(kind: str, parts: Mapping[str, Part], written: list[dict[str, Any]]) -> dict[str, Any]:
    """For every tensor its shape, dtype and slices; raises where the ranks together do not have all of it."""
    boxes: dict[str, dict[Box, int]] = {name: {} for name in parts}
    for rank, one in enumerate(written):
        for name, (offset, shape) in one["boxes"][kind].items():
            if name not in boxes:
                raise _different(f"rank {rank} has {name}, and rank 0 has not")
            boxes[name].setdefault(Box(tuple(offset), tuple(shape)), rank)  # of equal copies the first
    files = [getattr(RankFiles.of(rank, len(written)), kind) for rank in range(len(written))]
    entries = {}
    for name, part in parts.items():
        num_elements = sum(box.numel for box in boxes[name])
        if num_elements != math.prod(part.shape):
            raise _different(f"of {name} they have {num_elements} of {math.prod(part.shape)} elements")
        slices = [
            {"rank": rank, "file": files[rank], "offset": box.offset, "shape": box.shape}
            for box, rank in boxes[name].items()
        ]
        entries[name] = {"shape": part.shape, "dtype": part.dtype, "slices": slices}
    return entries


def _different(problem: str) -> SettingError:
    return SettingError(
        f"The ranks do not have the same state, so it was not saved: {problem}. Build model and optimizer the same way on every "
        "rank, and save after the same step."
    )


def _parts(tensors: Mapping[str, Tensor], root: str, rank: int) -> dict[str, Part]:
    parts = {}
    for name, tensor in tensors.items():
        box = box_of(tensor, f"{root}[{name!r}]")
        is_written = is_first_copy(tensor, rank) and box.numel > 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts[name] = Part(tuple(tensor.shape), dtype, box if is_written else None)
    return parts


def _written(tensors: Mapping[str, Tensor], parts: Mapping[str, Part]) -> dict[str, Tensor]:
    return {name: local(tensor) for name, tensor in tensors.items() if parts[name].box is not None}


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of one process; of a sharded one it must have all."""
    for name, tensor in tensors.items():
        if is_sharded(tensor) and local(tensor).shape != tensor.shape:
            raise SettingError(
                f"{name} is a DTensor of shape {tuple(tensor.shape)} of which this rank stores {tuple(local(tensor).shape)}, and it is "
                "saved by one rank alone. Save it through an Engine on every rank, or gather it with full_tensor() first."
            )
    return {name: local(tensor) for name, tensor in tensors.items()}


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
