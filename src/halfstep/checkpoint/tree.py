"""A tree of Python values and tensors as JSON and named tensors, and back again exactly.

The state of a training run is a tree: an optimizer's `state_dict()` has integer keys, a scheduler's has infinities
and a Counter, a random generator's has tuples and arrays. JSON has none of these, and pickle, which has them all,
executes code from the file. So values that JSON has are written as JSON, and the others as an object with one key that
starts with `$`:

    {"$dict": [[key, value], ...]}     a dict with a key that is not a string, or that starts with `$`
    {"$ordered": [[key, value], ...]}  an OrderedDict; `$counter`: a Counter
    {"$tuple": [...]}                  a tuple
    {"$deque": [[...], length]}        a deque and its maximum length, or null
    {"$dtype": "float32"}              a torch.dtype
    {"$bytes": "00ff"}                 bytes, in hexadecimal
    {"$int": "0x1..."}                 an int that does not fit into 64 bits
    {"$float": "7ff0000000000000"}     inf, -inf or NaN: its eight bytes, most significant first
    {"$tensor": "name"}                a tensor of that name; `"on": "cuda"` if it was not on the CPU
    {"$array": "name"}                 a NumPy array, stored as a tensor of that name
    {"$scalar": ["float32", "0000803f"]}  a NumPy scalar: its dtype and its bytes, least significant first

If the same tensor occurs twice in the tree, it is stored once and is the same object again after loading. A value of
any other type raises an error with its path when it is saved, while it can still be changed.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.checkpoint.tensorfile import require_storable, view_key
from halfstep.errors import SettingError

__all__ = ["tree_from_json", "tree_to_json"]

_DEEPEST = 100  # levels; also ends the walk over a tree that contains itself
_PAIRS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": lambda p: Counter(dict(p)),
}
_NUMPY = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
_NUMPY |= {"float16", "float32", "float64", "complex64", "complex128"}
_KEYS = (str, int, float, bool, type(None), bytes, tuple)


def tree_to_json(tree: Any, root: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """The JSON form of a tree, and its tensors by the names used there; paths in errors start with `root`."""
    writer = _Writer(root)
    node = writer.node(tree, ())
    return node, writer.tensors


def tree_from_json(node: Any, tensor: Callable[[str, str], Any]) -> Any:
    """The tree of that JSON form; `tensor(name, kind)` is called once per tensor.

    `kind` is the type of the device that the tensor was on; for "array" the result is the memory of a NumPy array.
    """
    loaded: dict[str, Any] = {}

    def load(name: str, kind: str = "cpu") -> Any:
        if name not in loaded:
            loaded[name] = tensor(name, kind)
        return loaded[name]

    def build(node: Any) -> Any:
        if isinstance(node, list):
            return [build(item) for item in node]
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {key: build(value) for key, value in node.items()}
        content = node[tag]
        if tag in _MAPPINGS:
            return _MAPPINGS[tag]([(build(key), build(value)) for key, value in content])
        if tag == "$tuple":
            return tuple(build(item) for item in content)
        if tag == "$deque":
            items, length = content
            return deque((build(item) for item in items), length)
        if tag == "$tensor":
            return load(content, node.get("on", "cpu"))
        return _leaf(tag, content, load)

    return build(node)


def _leaf(tag: str, content: Any, load: Callable[[str, str], Any]) -> Any:
    if tag == "$bytes":
        return bytes.fromhex(content)
    if tag == "$int":
        return int(content, 16)
    if tag == "$dtype":
        return _dtype(content)
    if tag == "$float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if tag == "$array":
        return load(content, "array").numpy()
    if tag == "$scalar":
        name, data = content
        return np.frombuffer(bytes.fromhex(data), dtype=np.dtype(name).newbyteorder("<"))[0].astype(name)
    raise SettingError(
        f"The saved state has an entry of the unknown kind {tag!r}; load it with the Halfstep version that wrote it."
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise SettingError(f"The saved state has the dtype {name!r}, which torch {torch.__version__} does not have.")
    return dtype


class _Writer:
    """One walk over a tree, collecting its tensors."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def node(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if len(path) > _DEEPEST:
            raise SettingError(
                f"{self._where(path[:6])}... is nested deeper than {_DEEPEST} levels, or contains itself."
            )
        if value is None or kind in {bool, str}:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is bytes:
            return {"$bytes": value.hex()}
        if kind is list:
            return [self.node(item, (*path, str(i))) for i, item in enumerate(value)]
        if kind is tuple:
            return {"$tuple": [self.node(item, (*path, str(i))) for i, item in enumerate(value)]}
        if kind is deque:
            return {"$deque": [[self.node(item, (*path, str(i))) for i, item in enumerate(value)], value.maxlen]}
        if kind is torch.dtype:
            return {"$dtype": str(value).removeprefix("torch.")}
        if kind in _PAIRS:
            return self._mapping(value, path)
        if isinstance(value, Tensor):
            on = value.device.type
            return {"$tensor": self._store(value, path)} | ({} if on == "cpu" else {"on": on})
        if kind is np.ndarray and value.dtype.name in _NUMPY and value.dtype.isnative:
            # A copy, because torch warns about read-only arrays and rejects negative strides.
            return {"$array": self._store(torch.from_numpy(value.copy(order="C")), path)}
        if isinstance(value, np.generic) and value.dtype.name in _NUMPY:
            return {"$scalar": [value.dtype.name, value.astype(value.dtype.newbyteorder("<")).tobytes().hex()]}
        raise SettingError(
            f"{self._where(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot store. "
            "It stores dict, list, tuple, deque, str, bytes, int, float, bool, None, tensors, dtypes and NumPy numbers; "
            "save the values you need from it instead of the object."
        )

    def _mapping(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        for key in value:
            if type(key) not in _KEYS:
                raise SettingError(
                    f"{self._where(path)} has the key {key!r} of type {type(key).__name__}, which a checkpoint "
                    "cannot store; use a str, int, float, bool, bytes, None or a tuple of these."
                )
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.node(item, (*path, key)) for key, item in value.items()}
        pairs = [[self.node(k, (*path, "key")), self.node(v, (*path, str(k)))] for k, v in value.items()]
        return {_PAIRS[type(value)]: pairs}

    def _store(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        require_storable(tensor, self._where(path))
        key = view_key(tensor)
        if key not in self._names:
            name = ".".join(path).encode("utf-8", "backslashreplace").decode() or self.root
            while name in self.tensors or name == "__metadata__":
                name += "'"  # "a.b" and "a" -> "b" have the same dotted path
            self.tensors[name] = tensor
            self._names[key] = name
        return self._names[key]

    def _where(self, path: tuple[str, ...]) -> str:
        return ".".join((self.root, *path))
