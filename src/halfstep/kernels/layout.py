"""How a lean optimizer stores one tensor: the weight, its master and its moments.

A 16-bit weight cannot represent an update smaller than half its ulp, so the optimizer keeps the fp32 value as well:

    master="split"   `low`: the 16 bits that the weight lacks (`kernels.split`); weight and master are 4 bytes together
    master="fp32"    `master`: an fp32 copy; 6 bytes together
    master="none"    nothing: updates below half a ulp are lost

The weight is the rounding of its master after every step. Where it is not, somebody else changed it, and the edited weight
is the master: an fp32 copy is compared with the weight at every step, and a split one contains the weight.

An fp32 weight is its own master and has no entry. Moments are stored as fp32, as bf16, or as 8-bit codes with one scale
per block (`kernels.moments8`), in the entries `<name>` and `<name>_scale`.

`Layout` is the value that the reference step, state conversion and the planner share. The enumerations are the modes of
the fused kernel: its compile-time arguments, with the same numbers on the host and on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.moments8 import BLOCK, decode, encode_signed, encode_unsigned, num_blocks
from halfstep.kernels.split import is_rounding, join, split
from halfstep.precision.formats import DTYPES_16_BIT, torch_dtype

__all__ = [
    "MASTER_ENTRIES",
    "Layout",
    "MasterMode",
    "MomentMode",
    "Rule",
    "WeightMode",
    "master_in",
    "restore",
]

MASTER_ENTRIES = ("low", "master")  # of a parameter's state


class Rule(IntEnum):
    """The rules that the fused kernel implements."""

    ADAM = 0
    SGD = 1
    PLAIN_SGD = 2  # without a momentum buffer
    LION = 3


class WeightMode(IntEnum):
    """Dtype of the weight in the fused kernel."""

    FP32 = 0  # its own master
    BF16 = 1
    FP16 = 2


class MasterMode(IntEnum):
    """What is stored next to the weight in the fused kernel."""

    NONE = 0
    SPLIT = 1  # int16: the bits that the weight lacks
    FP32 = 2  # an fp32 copy


class MomentMode(IntEnum):
    """Storage of the moments in the fused kernel."""

    FP32 = 0
    BF16 = 1
    CODES = 2  # 8 bits, with an fp32 scale per block


@dataclass(frozen=True)
class Layout:
    """Which states an optimizer has per parameter, and how it stores them and the master."""

    moments: tuple[str, ...]
    unsigned: frozenset[str] = frozenset()  # moments that are never negative
    master: str = "split"  # "split", "fp32" or "none"
    states: str = "fp32"  # "fp32", "bf16" or "8bit"
    scalars: tuple[str, ...] = ()  # entries of one fp32 number

    @property
    def moment_dtype(self) -> torch.dtype:
        """The dtype of a stored moment; signed and unsigned 8-bit codes count as int8."""
        return torch.int8 if self.states == "8bit" else torch_dtype(self.states)

    def pack(self, name: str, value: Tensor, step: Tensor) -> dict[str, Tensor]:
        """The state entries of an fp32 moment."""
        if self.states == "bf16":
            return {name: value.to(self.moment_dtype)}
        if self.states != "8bit":
            return {name: value}
        codes, scales = encode_unsigned(value, step) if name in self.unsigned else encode_signed(value)
        return {name: codes, f"{name}_scale": scales}

    def moment_bytes(self, numel: int) -> tuple[int, ...]:
        """Bytes of each entry that `pack` makes of a moment of `numel` elements; 8-bit codes are stored in whole blocks."""
        if self.states == "8bit":
            return (BLOCK * num_blocks(numel), 4 * num_blocks(numel))
        return (numel * (2 if self.states == "bf16" else 4),)

    def dtypes_of_moment(self, name: str) -> tuple[torch.dtype, ...]:
        """The dtype of each entry that `pack` makes of a moment."""
        if self.states == "8bit":
            return (torch.uint8 if name in self.unsigned else torch.int8, torch.float32)
        return (self.moment_dtype,)

    def master_entry(self, dtype: torch.dtype) -> str | None:
        """The entry with the master of a weight of this dtype; None where there is none."""
        if dtype not in DTYPES_16_BIT or self.master == "none":
            return None
        return "master" if self.master == "fp32" else "low"

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the entry with a master."""
        return torch.float32 if self.master == "fp32" else torch.int16

    def pack_master(self, master: Tensor, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        """The weight of this dtype for an fp32 master, and the state entries that restore the master from it."""
        if dtype not in DTYPES_16_BIT:
            return master, {}
        weight, low = split(master, dtype)
        entry = self.master_entry(dtype)
        if entry is None:
            return weight, {}
        return weight, {entry: master.clone() if entry == "master" else low}

    def master_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the entry that `pack_master` makes for a weight of `numel` elements."""
        entry = self.master_entry(dtype)
        return 0 if entry is None else numel * (4 if entry == "master" else 2)


def restore(state: Mapping[str, Any], name: str) -> Tensor:
    """A stored moment in fp32."""
    value: Tensor = state[name]
    scales = state.get(f"{name}_scale")
    return value.float() if scales is None else decode(value, scales)


def master_in(state: Mapping[str, Any], weight: Tensor) -> Tensor | None:
    """The fp32 master that a state has for this weight, or None where the weight is all there is.

    An fp32 copy counts only where a 16-bit weight is its rounding; elsewhere the weight was edited since and is returned.
    """
    if "master" not in state:
        return join(weight, state["low"]) if "low" in state else None
    master: Tensor = state["master"]
    if weight.dtype not in DTYPES_16_BIT:  # an fp32 model that loads the state of a 16-bit one
        return master
    return torch.where(is_rounding(weight, master), master, weight.float())
