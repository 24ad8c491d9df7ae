"""Optimizer states from one layout to another: fp32, bf16 and 8-bit moments, split, whole and no masters, torch's own.

Every layout stands for the same logical state: a step count, fp32 moments, an fp32 master. Converting goes through it.
Into fp32 nothing is lost; into bf16 or 8 bits moments are rounded as a step would round them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.moments8 import decode, encode_signed, encode_unsigned
from halfstep.kernels.split import join

__all__ = ["master_in", "pack", "plain", "restore"]

_MASTERS = ("low", "master")


def restore(stored: Mapping[str, Any], name: str) -> Tensor:
    """A stored moment in fp32."""
    value: Tensor = stored[name]
    scales = stored.get(f"{name}_scale")
    return value.float() if scales is None else decode(value, scales)


def pack(states: str, name: str, value: Tensor, step: Tensor, *, unsigned: bool) -> dict[str, Tensor]:
    """A moment as it is stored: in fp32, in bf16, or as 8-bit codes and the scales of their blocks."""
    if states == "bf16":
        return {name: value.to(torch.bfloat16)}
    if states != "8bit":
        return {name: value}
    codes, scales = encode_unsigned(value, step) if unsigned else encode_signed(value)
    return {name: codes, f"{name}_scale": scales}


def master_in(stored: Mapping[str, Any], weight: Tensor) -> Tensor | None:
    """The fp32 master that a stored state holds for this weight, or None where the weight is all there is."""
    if "master" in stored:
        master: Tensor = stored["master"]
        return master
    return join(weight, stored["low"]) if "low" in stored else None


def plain(stored: Mapping[str, Any], moments: Sequence[str]) -> dict[str, Any]:
    """A state as torch's own optimizers hold it: fp32 moments, no master; sharing no memory with what is stored."""
    found = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in stored.items()
        if name not in _MASTERS and not (name.endswith("_scale") and name.removesuffix("_scale") in stored)
    }
    return found | {name: restore(stored, name).clone() for name in moments if name in stored}
