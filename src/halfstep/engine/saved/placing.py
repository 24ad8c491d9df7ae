"""A state from disk, or of whole tensors, placed as the parameters of this run are: each rank reads only its own part.

What belongs to a sharded parameter (its weight, moments, master and EMA) becomes a DTensor with the parameter's placements,
whatever number of ranks wrote it. The rest is read as it is. 8-bit moments of a run that was not sharded are decoded first,
because their blocks cross the borders of shards; shards store them in fp32 (`optim.shards`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from halfstep.checkpoint.boxes import Box, box_of
from halfstep.checkpoint.names import match_names
from halfstep.checkpoint.stored import StoredTensor, read_all
from halfstep.engine.saved.matching import ModelNames, group_sizes
from halfstep.kernels.layout import master_in, restore
from halfstep.optim.shards import is_sharded, local, placed_as

__all__ = ["master_part", "read_state"]


def read_state(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """A state with all tensors read, and those of sharded parameters placed as the parameters are."""
    names, placed = ModelNames.of(module), dict(state)
    params = {names.own[id(p)]: p for p in module.parameters() if is_sharded(p)}
    if params:
        # What is missing or odd here is left as it is: `load_state` reports it.
        if isinstance(state.get("model"), Mapping):
            placed["model"] = _by_name(state["model"], names, params)
        if isinstance(state.get("ema"), Mapping) and isinstance(state["ema"].get("averages"), Mapping):
            placed["ema"] = {**state["ema"], "averages": _by_name(state["ema"]["averages"], names, params)}
        pairs = zip(state.get("optimizers", ()), state.get("names", ()), strict=False)
        placed["optimizers"] = [_optimizer(saved, names.resolve(own), params) for saved, own in pairs]
    tensors: dict[str, Any] = read_all(placed, StoredTensor.read)
    return tensors


def master_part(entry: Mapping[str, Any], weight: Tensor) -> Tensor | None:
    """The fp32 master in a saved entry, as `master_in`, on the part of each rank where the weight is sharded."""
    if not is_sharded(weight):
        return master_in(entry, weight)
    master = master_in({name: local(value) for name, value in entry.items()}, local(weight))
    return None if master is None else placed_as(weight, master)


def _by_name(tensors: Mapping[str, Any], names: ModelNames, params: Mapping[str, Any]) -> dict[str, Any]:
    own = match_names(tensors, names.every)
    targets = {name: params.get(names.every[own[name]]) if name in own else None for name in tensors}
    return {name: _placed(value, targets[name]) for name, value in tensors.items()}


def _optimizer(saved: Any, names: list[str], params: Mapping[str, Any]) -> Any:
    """A saved optimizer state; one with a layout of its own is left as it is."""
    sizes = group_sizes(saved)
    if sizes is None or sum(sizes) != len(names):
        return saved
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    entries = dict(saved["state"])
    for number, name in zip(numbers, names, strict=True):
        if name in params and isinstance(entries.get(number), Mapping):
            entries[number] = _entry(entries[number], params[name])
    return {**saved, "state": entries}


def _entry(entry: Mapping[str, Any], param: Any) -> dict[str, Any]:
    scaled = [name for name in entry if f"{name}_scale" in entry]
    decoded: dict[str, Any] = {
        name: value for name, value in entry.items() if name.removesuffix("_scale") not in scaled
    }
    for name in scaled:
        whole = read_all({key: entry[key] for key in (name, f"{name}_scale")}, StoredTensor.read)
        decoded[name] = restore(whole, name)
    return {name: _placed(value, param) for name, value in decoded.items()}


def _placed(value: Any, param: Any) -> Any:
    """A tensor of a sharded parameter with its placements; anything else as it is."""
    is_whole = isinstance(value, StoredTensor | Tensor) and not is_sharded(value)
    if param is None or not is_whole or not value.shape or tuple(value.shape) != tuple(param.shape):
        return value
    box = box_of(param, "a parameter")
    if isinstance(value, StoredTensor):
        return placed_as(param, value.read(box))
    return placed_as(param, value[box.within(Box.whole(tuple(value.shape)))].clone())
