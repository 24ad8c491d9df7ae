"""One lean step of one tensor, in any layout: the readable reference of `lean_triton`.

    read      master and moments in fp32, from wherever they are stored
    update    the optimizer's rule, on fp32 tensors
    write     moments, master and weight, rounded to their storage; nothing if the flag is set

The flag and the divisor are device tensors and are never read on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.kernels.layout import Layout, master_in, restore
from halfstep.kernels.split import split
from halfstep.kernels.table import copied_to
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["Update", "lean_step", "read_master", "write_master"]

Update: TypeAlias = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]  # (states, master, gradient) -> new master


def lean_step(
    weight: Tensor,  # fp32, bf16 or fp16; changed in place
    grad: Tensor,  # of any floating dtype
    state: dict[str, Tensor],  # in this layout, with the number of applied steps in `step`; changed in place
    layout: Layout,
    update: Update,
    divisor: Tensor | None = None,  # 0-dim: the gradient is divided by it
    found_inf: Tensor | None = None,  # 0-dim: anything but 0 skips the step
) -> None:
    """Advance weight, master, moments and step count by one step, or leave every bit of them if the flag is set."""
    master, wide = read_master(weight, state), grad.float()
    if divisor is not None:
        wide = wide * (1 / copied_to(divisor, wide.device, torch.float32))  # as the kernels do
    step = state["step"] + 1
    moments = [name for name in layout.moments if name in state]
    scalars = [name for name in layout.scalars if name in state]
    working = (
        {name: restore(state, name) for name in moments} | {name: state[name] for name in scalars} | {"step": step}
    )
    inputs = {"master": master, "grad": wide} | working
    versions = {name: _version(tensor) for name, tensor in inputs.items()}
    new_master = update(working, master, wide).float()  # a 0-dim tensor times an fp64 scalar is fp64
    _check_unchanged(inputs, versions)
    skip = None if found_inf is None else copied_to(found_inf, weight.device) != 0
    for name in moments:
        for entry, value in layout.pack(name, working[name].float(), step).items():
            _write(state[entry], value, skip)
    for name in scalars:
        _write(state[name], working[name], skip)
    write_master(weight, state, new_master, skip)
    _write(state["step"], step, skip)


def read_master(weight: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The fp32 value that the optimizer works on: the stored master, or the weight itself."""
    # A weight that was cast to fp32 in between is its own master, whatever is still stored next to it.
    master = master_in(state, weight.detach()) if weight.dtype in DTYPES_16_BIT else None
    return weight.detach().float() if master is None else master


def write_master(weight: Tensor, state: dict[str, Tensor], master: Tensor, skip: Tensor | None = None) -> None:
    """Store a new master: the weight's rounding, and what the state has next to it; nothing where `skip` is set."""
    if weight.dtype not in DTYPES_16_BIT:
        _write(weight, master, skip)
        return
    # A finite master past the dtype's end would make an infinite weight, and no later step could undo that.
    largest = torch.finfo(weight.dtype).max
    rounded, low = split(master, weight.dtype)
    beyond = rounded.isinf() & master.isfinite()
    if "low" in state:
        _write(state["low"], torch.where(beyond, torch.zeros_like(low), low), skip)
    if "master" in state:
        _write(state["master"], torch.where(master.isfinite(), master.clamp(-largest, largest), master), skip)
    _write(weight, torch.where(beyond, rounded.clamp(-largest, largest), rounded), skip)


def _write(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    target.copy_(value if skip is None else torch.where(skip, target.to(value.dtype), value))


def _version(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001 - torch's count of in-place changes, which has no public name


def _check_unchanged(inputs: dict[str, Tensor], versions: dict[str, int]) -> None:
    """Raise if the rule changed its inputs in place: they may be the stored tensors, which a skipped step must keep."""
    changed = [name for name, tensor in inputs.items() if _version(tensor) != versions[name]]
    if changed:
        raise SettingError(
            f"The optimizer's update() changed {', '.join(changed)} in place, and a skipped step could not restore that. "
            "Return a new master and put new tensors into `state`: state[name] = state[name] * beta + grad."
        )
