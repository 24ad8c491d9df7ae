"""Tensors in a safetensors file: streamed to disk by this module, parsed by the `safetensors` library.

Reading goes through `safetensors.safe_open`, which checks the header against the file before it returns anything. On
top of that, this module restores dtypes that the format cannot name, returns names in the order of the file, copies
each tensor out of the library's memory map, and reports every damaged file as one `SettingError`.

Writing stays here, because the library's writers need all tensors in CPU memory at once. `tensor_blocks` yields the
file in blocks that the caller hashes and syncs as it writes, and copies a tensor that is on a GPU or not contiguous
only while its bytes are written. The layout is the library's: eight bytes with the length of a JSON header (little
endian), the header with each tensor's dtype, shape and offsets, then the raw bytes.

A dtype without a name in the format is stored as a related one (complex as pairs of its real type, the rarer 8-bit
floats as U8), and the entry `halfstep.dtypes` of the header's `__metadata__` records the original; other readers see
the stored form. Bytes are copied and never computed with, so NaN payloads are preserved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.optim.shards import is_sharded, local

__all__ = ["BLOCK_BYTES", "TensorReader", "file_bytes", "require_storable", "tensor_blocks", "view_key"]

BLOCK_BYTES = 8 * 2**20
_DTYPES_KEY = "halfstep.dtypes"  # metadata entry: tensor name -> dtype, where the format has no name for the dtype

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
# Dtypes without a name in the oldest safetensors we support (0.4.3), and the dtype each is stored as.
_STORED_AS: dict[torch.dtype, torch.dtype] = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
}
_UNNAMED = {str(dtype).removeprefix("torch."): dtype for dtype in _STORED_AS}


def require_storable(tensor: Tensor, name: str) -> None:
    """Raise a SettingError that names the tensor if its values, or those of this rank, are not plain bytes in memory."""
    tensor = local(tensor)
    if type(tensor) not in {Tensor, torch.nn.Parameter}:
        kind, advice = f"a {type(tensor).__name__}", "gather or convert it to a plain tensor first"
    elif tensor.layout is not torch.strided:
        kind, advice = f"a tensor of layout {tensor.layout}", "call .to_dense() on it first"
    elif tensor.device.type == "meta":
        kind, advice = "a meta tensor, which has no values", "materialize the model before saving it"
    elif tensor.dtype not in _NAMES and tensor.dtype not in _STORED_AS:
        kind, advice = f"a tensor of dtype {tensor.dtype}", "convert it to another dtype first"
    else:
        return
    raise SettingError(f"{name} is {kind}, which a checkpoint cannot store; {advice}.")


def view_key(tensor: Tensor) -> tuple[object, ...]:
    """A key that is equal for two tensors exactly if they are the same view of the same memory."""
    if is_sharded(tensor):
        part = local(tensor)
        # By storage and not by address: a rank that stores nothing of two tied tensors must find them tied as the others do.
        storage, kind = part.untyped_storage()._cdata, "sharded"  # noqa: SLF001
        return (kind, storage, part.storage_offset(), tuple(tensor.shape), part.stride(), part.dtype)
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
    """The size of the file that `tensor_blocks` yields for these tensors."""
    return len(_header(tensors)) + sum(t.numel() * t.itemsize for t in tensors.values())


def tensor_blocks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the safetensors file of these tensors in blocks of at most 8 MiB; copies at most one tensor at a time."""
    yield _header(tensors)
    for name in _order(tensors):
        data = _raw(tensors[name])
        for start in range(0, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]
        del data  # free the copy before the next tensor is copied


class TensorReader:
    """An open safetensors file from which tensors are read one by one; iterating yields their names in file order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        try:
            self._file = self._stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise self._invalid(f"is not a valid safetensors file ({error})") from None
        self._num_bytes = path.stat().st_size
        self._names = _names_in_file_order(path)
        self._dtypes = self._read_dtypes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of the tensor called `name`."""
        stored = self._slice_of(name)
        shape, names = tuple(stored.get_shape()), {text: dtype for dtype, text in _NAMES.items()}
        dtype = _UNNAMED.get(str(self._dtypes.get(name))) or names[stored.get_dtype()]
        return (shape[:-1] if dtype.is_complex else shape), dtype

    def read(self, name: str, device: torch.device | str = "cpu", part: Sequence[slice] | None = None) -> Tensor:
        """Copy the tensor called `name`, or a part of it, to `device`; the result does not depend on the file."""
        stored = self._slice_of(name)
        num_bytes = self.path.stat().st_size
        if num_bytes < self._num_bytes:  # touching the missing part of a memory map would kill the process
            raise self._invalid(f"shrank from {self._num_bytes} to {num_bytes} bytes while it was read")
        # The library returns a view of its memory map, which would change or fault along with the file.
        data: Tensor = stored[tuple(part)] if part else self._file.get_tensor(name)
        tensor = data.to(device, copy=True)
        return self._restore_dtype(name, tensor) if name in self._dtypes else tensor

    def _slice_of(self, name: str) -> Any:
        if name not in self._names:
            raise self._invalid(f"has no tensor {name!r}")
        stored = self._file.get_slice(name)
        stored_dtype = stored.get_dtype()
        if stored_dtype not in _NAMES.values():  # newer versions of the library accept more than Halfstep writes
            raise self._invalid(f"has the tensor {name!r} in the dtype {stored_dtype}, which Halfstep never writes")
        return stored

    def _restore_dtype(self, name: str, stored: Tensor) -> Tensor:
        dtype = _UNNAMED.get(str(self._dtypes[name]))
        is_complex = dtype is not None and dtype.is_complex
        if dtype is None or stored.dtype is not _STORED_AS[dtype] or (is_complex and stored.shape[-1:] != (2,)):
            raise self._invalid(
                f"has {name!r} as {stored.dtype} of shape {tuple(stored.shape)}, which cannot be {self._dtypes[name]!r}"
            )
        return stored.reshape(-1).view(dtype).reshape(stored.shape[:-1] if is_complex else stored.shape)

    def _read_dtypes(self) -> dict[str, Any]:
        """The dtypes of the tensors that are stored as another one."""
        metadata = self._file.metadata() or {}
        try:
            dtypes = json.loads(metadata.get(_DTYPES_KEY, "{}"))
        except (ValueError, RecursionError):
            raise self._invalid(f"has metadata {_DTYPES_KEY!r} that is not JSON") from None
        return dtypes if isinstance(dtypes, dict) else {}

    def _invalid(self, problem: str) -> SettingError:
        return SettingError(
            f"{self.path} {problem}; it was not written by Halfstep, or it changed later. Save the checkpoint again."
        )


def _names_in_file_order(path: Path) -> dict[str, None]:
    """The tensor names of a valid file, as an ordered set; the library sorts them, and a state dict has an order."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return dict.fromkeys(name for name in header if name != "__metadata__")


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names, largest elements first, so that every tensor starts at a multiple of its element size."""
    return sorted(tensors, key=lambda name: -tensors[name].itemsize)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """The header's length and JSON, padded with spaces so that the data starts at a multiple of 8."""
    offsets, position = {}, 0
    for name in _order(tensors):
        offsets[name] = [position, position + tensors[name].numel() * tensors[name].itemsize]
        position = offsets[name][1]
    dtypes, entries = {}, {}
    for name, tensor in tensors.items():
        stored = _STORED_AS.get(tensor.dtype, tensor.dtype)
        shape = [*tensor.shape, 2] if tensor.is_complex() else [*tensor.shape]
        if stored is not tensor.dtype:
            dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        entries[name] = {"dtype": _NAMES[stored], "shape": shape, "data_offsets": offsets[name]}
    metadata = {"format": "pt"} | ({_DTYPES_KEY: json.dumps(dtypes)} if dtypes else {})
    text = json.dumps({"__metadata__": metadata, **entries}, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, without a copy if it is contiguous on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.device.type != "cpu" or not plain.is_contiguous():
        plain = torch.empty_like(plain, device="cpu", memory_format=torch.contiguous_format).copy_(plain)
    flat = plain.as_strided((plain.numel(),), (1,))  # reshape(-1) keeps an odd stride where there is only one element
    return flat.view(torch.uint8).numpy().data
