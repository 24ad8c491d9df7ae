"""Tensors in a safetensors file, written and read one at a time.

The layout is the one the `safetensors` package defines: eight bytes with the length of a JSON header (little
endian), the header with each tensor's dtype, shape and place, then the raw bytes. This file writes it by hand for
three reasons: the blocks can be hashed and synced on their way to the disk, a tensor that lives on a GPU or is not
contiguous is copied only while its own bytes are written, and dtypes that the format does not have still survive.

A dtype the format has no name for is stored under the one next to it (complex as pairs of its real type, the rarer
8-bit floats as U8), and the header's `__metadata__` says which; other readers see the stored form. Bytes are never
computed with, only copied, so the payload of a NaN arrives as it left.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from halfstep.errors import SettingError

__all__ = ["BLOCK_BYTES", "TensorReader", "file_bytes", "require_storable", "tensor_blocks", "view_key"]

BLOCK_BYTES = 8 * 2**20
_OWN = "halfstep.dtypes"  # the metadata entry that names the dtypes the format lacks
_LONGEST_HEADER = 100 * 2**20  # the limit of the safetensors package

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# What the oldest safetensors we support (0.4.3) cannot name, and the dtype it is stored as.
_STORED_AS: dict[torch.dtype, torch.dtype] = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
}
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in _STORED_AS}


def require_storable(tensor: Tensor, name: str) -> None:
    """Refuse a tensor whose values are not plain bytes in memory, by its name."""
    if type(tensor) not in {Tensor, torch.nn.Parameter}:
        what, advice = f"a {type(tensor).__name__}", "gather or convert it to a plain tensor first"
    elif tensor.layout is not torch.strided:
        what, advice = f"a tensor of layout {tensor.layout}", "call .to_dense() on it first"
    elif tensor.device.type == "meta":
        what, advice = "a meta tensor, which has no values", "materialise the model before saving it"
    elif tensor.dtype not in _NAMES and tensor.dtype not in _STORED_AS:
        what, advice = f"a tensor of dtype {tensor.dtype}", "convert it to a dtype that a checkpoint can hold"
    else:
        return
    raise SettingError(f"{name} is {what}, which a checkpoint cannot hold; {advice}.")


def view_key(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same view of the same memory, and for no others."""
    if tensor.numel() == 0:
        return (id(tensor),)  # empty tensors have no memory to share
    storage = tensor.untyped_storage().data_ptr()
    view = (
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
    return (tensor.device, storage, *view)


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """How long the file of these tensors will be."""
    return len(_header(tensors)) + sum(t.numel() * t.itemsize for t in tensors.values())


def tensor_blocks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The file of these tensors, in blocks of at most 8 MiB; copies at most one tensor at a time."""
    yield _header(tensors)
    for name in _order(tensors):
        data = _raw(tensors[name])
        for start in range(0, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]
        del data  # before the next tensor is copied


class TensorReader:
    """An open safetensors file from which tensors are read one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        try:
            self._entries, self._own = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """The tensor of that name, in memory of its own on `device`."""
        try:
            entry = self._entries[name]
            stored = _DTYPES[entry["dtype"]]
            shape = [int(n) for n in entry["shape"]]
            start, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise self._foreign(f"has no tensor {name!r} of a known dtype") from None
        num_bytes = math.prod(shape) * stored.itemsize
        if min(start, *shape, 0) < 0 or end - start != num_bytes or self._data_start + end > self._size:
            raise self._foreign(f"gives {name!r} the bytes {start} to {end} for the shape {shape} of {stored}")
        raw = torch.empty(num_bytes, dtype=torch.uint8)
        self._read_into(raw.numpy().data, self._data_start + start)
        dtype = _BY_NAME.get(self._own.get(name, ""), stored)
        if dtype.is_complex:
            shape = shape[:-1]  # pairs of the real type
        return raw.view(dtype).reshape(shape).to(device)

    def _read_into(self, target: memoryview, position: int) -> None:
        self._file.seek(position)
        done = 0
        while done < len(target):
            count = self._file.readinto(target[done : done + BLOCK_BYTES])
            if not count:
                raise self._foreign("ended while it was read")
            done += count

    def _read_header(self) -> tuple[dict[str, Any], dict[str, str]]:
        self._size = self.path.stat().st_size
        length = int.from_bytes(self._file.read(8), "little")
        if self._size < 8 or length > min(self._size - 8, _LONGEST_HEADER):
            raise self._foreign("has no safetensors header")
        self._data_start = 8 + length
        try:
            entries = json.loads(self._file.read(length))
            own = json.loads(entries.pop("__metadata__", {}).get(_OWN, "{}"))
        except (ValueError, AttributeError, TypeError, RecursionError):
            raise self._foreign("has a header that is not JSON of the right form") from None
        return entries, own if isinstance(own, dict) else {}

    def _foreign(self, what: str) -> SettingError:
        return SettingError(f"{self.path} {what}; it was not written by Halfstep. Save the checkpoint again.")


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Widest elements first, so that every tensor starts at a multiple of its element size."""
    return sorted(tensors, key=lambda name: -tensors[name].itemsize)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """The length and the JSON, padded with spaces so that the data starts at a multiple of 8."""
    places, position = {}, 0
    for name in _order(tensors):
        places[name] = [position, position + tensors[name].numel() * tensors[name].itemsize]
        position = places[name][1]
    own, entries = {}, {}
    for name, tensor in tensors.items():
        stored = _STORED_AS.get(tensor.dtype, tensor.dtype)
        shape = [*tensor.shape, 2] if tensor.is_complex() else [*tensor.shape]
        if stored is not tensor.dtype:
            own[name] = str(tensor.dtype).removeprefix("torch.")
        entries[name] = {"dtype": _NAMES[stored], "shape": shape, "data_offsets": places[name]}
    metadata = {"format": "pt"} | ({_OWN: json.dumps(own)} if own else {})
    text = json.dumps({"__metadata__": metadata, **entries}, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; shares its memory where that is possible."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.device.type != "cpu" or not plain.is_contiguous():
        plain = torch.empty_like(plain, device="cpu", memory_format=torch.contiguous_format).copy_(plain)
    flat = plain.as_strided((plain.numel(),), (1,))  # reshape(-1) keeps an odd stride where there is only one element
    return flat.view(torch.uint8).numpy().data
