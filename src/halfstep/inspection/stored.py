"""What exists: weights, buffers, masters, optimizer states, gradients and the EMA, read from the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.backends.deepspeed.partition import numel_of
from halfstep.inspection.averages import ema_fact
from halfstep.inspection.facts import NONE, Fact, fact_of, unknown_fact
from halfstep.inspection.masters import is_master_entry, master_fact, trained_params
from halfstep.inspection.storage import bytes_of, state_format, states_in
from halfstep.inspection.wrappers import Parts, optimizer_chain
from halfstep.precision.formats import format_name

__all__ = ["scale_of", "stored_facts"]


def stored_facts(parts: Parts, *, stepped: bool) -> list[Fact]:
    """The facts of what is stored now; `stepped` is whether a step is known to have been applied."""
    trained = trained_params(parts)
    frozen = {name: param for name, param in parts.params.items() if name not in trained}
    floating = {name: buffer for name, buffer in parts.buffers.items() if buffer.is_floating_point()}
    return [
        _tensors("weights", trained),
        _tensors("frozen", frozen),
        _tensors("buffers", floating),
        master_fact(parts),
        _states_fact(parts, stepped=stepped),
        ema_fact(parts),
        _scaler_fact(parts),
    ]


def _tensors(key: str, tensors: Mapping[str, Tensor]) -> Fact:
    entries = [(name, format_name(tensor.dtype), numel_of(tensor)) for name, tensor in tensors.items()]
    return fact_of(key, entries, num_bytes=sum(map(bytes_of, tensors.values())))


def _states_fact(parts: Parts, *, stepped: bool) -> Fact:
    if not parts.optimizers:
        return unknown_fact("states", "pass the optimizer to inspect(model, optimizer).")
    entries, size = [], 0
    for name, kind, tensor, form in _states(parts):
        entries.append((f"{name}.{kind}", form, tensor.numel()))
        size += bytes_of(tensor)
    if not entries and not stepped and not all(map(_is_stateless, parts.optimizers)):
        return unknown_fact(
            "states", "no states exist before the first step. Inspect after it, or put one step inside the block."
        )
    kinds = ", ".join(dict.fromkeys(entry[0].rpartition(".")[2] for entry in entries))
    return fact_of("states", entries, note=kinds, num_bytes=size + _companion_bytes(parts))


def _states(parts: Parts) -> Iterator[tuple[str, str, Tensor, str]]:
    """(parameter, state, tensor, format) of every state that is no master."""
    names = parts.name_of()
    for param, entries in _entries(parts):
        for kind, tensor in states_in(entries):
            if not is_master_entry(kind):
                name = names.get(id(param), f"a tensor of {param.numel():,}" if isinstance(param, Tensor) else "state")
                yield name, kind, tensor, state_format(kind, tensor, entries)


def _entries(parts: Parts) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    read: set[int] = set()
    for optimizer in (each for outer in parts.optimizers for each in optimizer_chain(outer)):
        states = getattr(optimizer, "state", None)
        for param, entries in states.items() if isinstance(states, Mapping) else ():
            if isinstance(entries, Mapping) and id(entries) not in read:  # wrappers share the states of what they wrap
                read.add(id(entries))
                yield param, entries


def _companion_bytes(parts: Parts) -> int:
    """Scales and code tables of quantised states."""
    total = 0
    for _, entries in _entries(parts):
        own = {name for name, _ in states_in(entries)}
        others = [value for name, value in entries.items() if name not in own and not is_master_entry(str(name))]
        total += sum(bytes_of(value) for value in others if isinstance(value, Tensor) and value.dim() > 0)
    return total


def _is_stateless(optimizer: Any) -> bool:
    """Whether an optimizer never has states, or was stepped and has none."""
    chain = list(optimizer_chain(optimizer))
    plain = all(
        isinstance(each, torch.optim.SGD) and not any(group.get("momentum") for group in each.param_groups)
        for each in chain
    )
    return plain or any(bool(getattr(each, "state", None)) for each in chain)


def _scaler_fact(parts: Parts) -> Fact:
    scaler = parts.scaler
    if scaler is None and parts.deepspeed is not None:
        engine = parts.deepspeed
        kind = ("dynamic" if engine.dynamic_loss_scale() else "static") if engine.fp16_enabled() else NONE
        return fact_of("scaler", [("", kind, 1)], note="by DeepSpeed")
    if scaler is None:
        return fact_of("scaler", (), note="no scaler was passed")
    name, scale = type(scaler).__name__, scale_of(scaler)
    mode = getattr(getattr(scaler, "settings", None), "mode", None)  # of Halfstep's scalers
    is_enabled = getattr(scaler, "is_enabled", None)
    if is_enabled is not None and not is_enabled():
        kind = "off"
    elif mode is not None:
        kind = mode if mode in {"none", "static"} else "dynamic"
    else:
        kind = "static" if "static" in name.lower() else "dynamic"
    return fact_of("scaler", [("", kind, 1)], note=name + ("" if scale is None else f", scale {scale:g}"))


def scale_of(scaler: Any) -> float | None:
    """The loss scale now; on a GPU this waits for the device."""
    for name in ("get_scale", "loss_scale", "scale"):
        value = getattr(scaler, name, None)
        if name == "get_scale" and callable(value):
            value = value()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, Tensor) and value.numel() == 1:
            return float(value)
    return None
