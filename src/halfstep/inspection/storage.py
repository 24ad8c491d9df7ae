"""How a tensor is stored: its format by content, and its bytes on this rank.

Tensor subclasses show the dtype that they compute in (torchao's 8-bit states show fp32), so bytes are those of the plain
tensors inside, and quantised states are recognised by class name or by the companions that they are stored with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from halfstep.optim.shards import local
from halfstep.precision.formats import format_name

__all__ = ["bytes_of", "state_format", "states_in", "tensors_in"]

_QUANTISED = {"OptimState8bit": "8bit", "OptimState4bit": "4bit", "OptimStateFp8": "fp8_e4m3fn"}  # torchao
_COMPANIONS = (
    "absmax",
    "qmap",
    "new_max",
    "max",
    "gnorm_vec",
    "unorm_vec",
)  # of bitsandbytes: not states by themselves
_DEEPEST = 4  # levels of lists and dictionaries


def bytes_of(tensor: Any) -> int:
    """Bytes on this rank, of the tensors inside a tensor subclass."""
    tensor = local(tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        inner, _ = flatten()
        return sum(bytes_of(getattr(tensor, name)) for name in inner)
    return int(tensor.numel() * tensor.element_size())


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif depth < _DEEPEST and isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, depth + 1)


def states_in(entries: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The states of one parameter with their names: no step counts, scales and code tables."""
    for name, value in entries.items():
        base = str(name).removesuffix("_scale")
        if name == "step" or str(name).rstrip("0123456789") in _COMPANIONS or (base != name and base in entries):
            continue
        for tensor in tensors_in(value):
            if tensor.dim() > 0:
                yield str(name), tensor


def state_format(name: str, tensor: Tensor, entries: Mapping[str, Any]) -> str:
    """The format of one state: 8-bit codes with a scale next to them are "8bit", whatever integers they are stored in."""
    tensor = local(tensor)
    kind = next((_QUANTISED[each.__name__] for each in type(tensor).__mro__ if each.__name__ in _QUANTISED), None)
    if kind is not None:
        return kind
    number = name[len(name.rstrip("0123456789")) :]
    has_scale = f"{name}_scale" in entries or f"absmax{number}" in entries
    if has_scale and not tensor.is_floating_point():
        return f"{8 * tensor.element_size()}bit"
    return format_name(tensor.dtype)
