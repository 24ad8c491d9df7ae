"""Optimizer states from one layout to another: fp32, bf16 and 8-bit moments, split, fp32 and no masters, torch's own.

Every layout represents the same logical state: a step count, fp32 moments, an fp32 master. Converting goes through it.
Into fp32 nothing is lost; into bf16 or 8 bits moments are rounded as a step would round them.

torch's own `load_state_dict` casts every entry but the step count to the dtype of its parameter, integers too. Codes and low
halves are numbers that fp32 represents exactly, so they become integers again here; what a 16-bit dtype has rounded
is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.kernels.layout import MASTER_ENTRIES, Layout, master_in, restore
from halfstep.precision.formats import DTYPES_16_BIT, format_name

__all__ = ["convert", "master_in", "plain", "restore", "without_steps"]


def convert(saved: Mapping[str, Any], param: Tensor, layout: Layout) -> dict[str, Any]:
    """A saved state of `param` in this layout: a bit-exact copy if it has that layout already.

    Where the master's storage changes, the weight is set to the master's rounding.
    """
    state = {
        name: value.detach().clone().to(param.device) if isinstance(value, Tensor) else value
        for name, value in saved.items()
        if value is not None
    }
    state |= _integers_again(state, layout)
    moments = [name for name in layout.moments if name in state]
    if "step" in state:
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=param.device)
    elif moments:  # torch's SGD counts no steps; all that matters is that the next is not the first
        state["step"] = torch.ones((), dtype=torch.float32, device=param.device)
    for name in moments:
        stored_as = "8bit" if f"{name}_scale" in state else format_name(state[name].dtype)
        if stored_as != layout.states:
            value = restore(state, name)
            state.pop(f"{name}_scale", None)
            state |= layout.pack(name, value, state["step"])
    return _convert_master(state, param, layout)


def _integers_again(state: Mapping[str, Any], layout: Layout) -> dict[str, Tensor]:
    """The entries that torch cast to a floating-point dtype, as the integers they were."""
    scaled = [name for name in layout.moments if f"{name}_scale" in state]
    integers = {name: torch.uint8 if name in layout.unsigned else torch.int8 for name in scaled} | {"low": torch.int16}
    cast = {name: dtype for name, dtype in integers.items() if name in state and state[name].is_floating_point()}
    for name in (*(name for name in cast if name == "low"), *(f"{name}_scale" for name in scaled), "master"):
        dtype = state[name].dtype if name in state else torch.float32
        if dtype in DTYPES_16_BIT:
            raise SettingError(
                f"The entry {name!r} of an optimizer state was cast to {format_name(dtype)}, which has too few bits for it: torch's "
                "load_state_dict casts states to the dtype of the weights. Load the state while the weights are fp32, before "
                "Engine(...) casts them, or after Engine(...), which forwards it, or use Engine.load."
            )
    exact = {name: state[name].to(dtype) for name, dtype in cast.items()}
    for name, values in exact.items():
        if not torch.equal(values.to(state[name].dtype), state[name]):
            raise SettingError(
                f"The entry {name!r} of an optimizer state contains numbers that are not {cast[name]}, so it was changed after it was "
                "saved. Load the original state."
            )
    return exact


def _convert_master(state: dict[str, Any], param: Tensor, layout: Layout) -> dict[str, Any]:
    if layout.master_entry(param.dtype) in state or not state.keys() & set(MASTER_ENTRIES):
        return state
    if "low" in state and param.dtype not in DTYPES_16_BIT:
        raise SettingError(
            f"The state has the low halves of split 16-bit weights, and the parameter of shape {tuple(param.shape)} is "
            f"{str(param.dtype).removeprefix('torch.')}. Load it through an Engine, which has both halves."
        )
    master = master_in(state, param.detach())
    assert master is not None
    weight, entries = layout.pack_master(master, param.dtype)
    with torch.no_grad():
        param.copy_(weight)
    return {name: value for name, value in state.items() if name not in MASTER_ENTRIES} | entries


def plain(state: Mapping[str, Any], moments: Sequence[str] | None = None) -> dict[str, Any]:
    """A state as torch's own optimizers store it: fp32 moments, no master; it shares no memory with `state`.

    Without `moments`, those are the entries with scales and the bf16 ones.
    """
    scaled = {name for name in state if f"{name}_scale" in state}
    if moments is None:
        moments = [n for n, v in state.items() if n in scaled or (isinstance(v, Tensor) and v.dtype is torch.bfloat16)]
    dropped = {*MASTER_ENTRIES, *(f"{name}_scale" for name in scaled)}
    copies = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in state.items()
        if name not in dropped
    }
    return copies | {name: restore(state, name).clone() for name in moments if name in state}


def without_steps(entries: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """States for a class of torch's that counts no steps, by number.

    A count that never advances again would be wrong once the state comes back, and before the first step such a class has
    no state: zeros in its place would be taken for those of an earlier step.
    """
    started = {i: e for i, e in entries.items() if "step" not in e or float(e["step"]) != 0}
    return {i: {name: value for name, value in entry.items() if name != "step"} for i, entry in started.items()}
