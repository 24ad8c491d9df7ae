"""Tensors of a checkpoint that are read when they are needed, whole or in part, from the files of any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.checkpoint.boxes import Box
from halfstep.checkpoint.tensorfile import TensorReader
from halfstep.errors import SettingError

__all__ = ["StoredFiles", "StoredTensor", "read_all", "stored_slices", "stored_whole"]


class StoredFiles:
    """The tensor files of a checkpoint directory, each opened once; close it after the last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack, self._readers = ExitStack(), dict[str, TensorReader]()

    def reader(self, file: str) -> TensorReader:
        """The open file of that name."""
        if file not in self._readers:
            self._readers[file] = self._stack.enter_context(TensorReader(self.path / file))
        return self._readers[file]

    def close(self) -> None:
        """Close all files; tensors that were read stay valid."""
        self._stack.close()
        self._readers.clear()


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor on disk: its shape, dtype and slices."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: tuple[tuple[str, Box], ...]  # file and part
    files: StoredFiles = field(repr=False)
    kind: str = "cpu"  # the type of the device it was on

    def read(self, box: Box | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Copy a part of the tensor, or all of it, to `device`; only the bytes of that part are read."""
        wanted = Box.whole(self.shape) if box is None else box
        pieces = [(file, part, part.overlap(wanted)) for file, part in self.slices]
        needed = [(file, part, piece) for file, part, piece in pieces if piece is not None]
        if len(needed) == 1 and needed[0][2] == wanted:
            return self._piece(*needed[0], device)
        tensor = torch.empty(wanted.shape, dtype=self.dtype, device=device)
        for file, part, piece in needed:
            tensor[piece.within(wanted)] = self._piece(file, part, piece, device)
        if sum(piece.numel for *_, piece in needed) != wanted.numel:
            raise SettingError(
                f"{self.files.path / 'index.json'} does not have slices for all of {self.name!r}; save the checkpoint again."
            )
        return tensor

    def _piece(self, file: str, part: Box, piece: Box, device: torch.device | str) -> Tensor:
        reader = self.files.reader(file)
        if reader.describe(self.name) != (part.shape, self.dtype):
            shape, dtype = reader.describe(self.name)
            raise SettingError(
                f"{reader.path} has {self.name!r} as {dtype} of shape {shape}, and the index has {self.dtype} of shape {part.shape}; save the "
                "checkpoint again."
            )
        return reader.read(self.name, device, None if piece == part else piece.within(part))


def stored_whole(files: StoredFiles, file: str, name: str, kind: str = "cpu") -> StoredTensor:
    """A tensor that one file has all of."""
    shape, dtype = files.reader(file).describe(name)
    return StoredTensor(name, shape, dtype, ((file, Box.whole(shape)),), files, kind)


def stored_slices(files: StoredFiles, name: str, entry: Mapping[str, Any], kind: str = "cpu") -> StoredTensor:
    """A tensor of which an entry of the index describes the slices."""
    shape, dtype = tuple(entry["shape"]), getattr(torch, entry["dtype"])
    slices = tuple((s["file"], Box(tuple(s["offset"]), tuple(s["shape"]))) for s in entry["slices"])
    if not isinstance(dtype, torch.dtype) or any(len(box.offset) != len(shape) for _, box in slices):
        raise KeyError(name)
    return StoredTensor(name, shape, dtype, slices, files, kind)


def read_all(tree: Any, read: Callable[[StoredTensor], Tensor]) -> Any:
    """A tree with its stored tensors read; one that occurs twice is the same tensor again."""
    loaded: dict[int, Tensor] = {}

    def leaf(value: Any) -> Any:
        if not isinstance(value, StoredTensor):
            return value
        if id(value) not in loaded:
            loaded[id(value)] = read(value)
        return loaded[id(value)]

    return pytree.tree_map(leaf, tree)
