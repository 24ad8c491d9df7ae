"""What an optimizer allocates: states, masters, tables and temporaries, for each way of stepping.

    lean        halfstep.optim: moments and masters by the declared layout, and the kernels' tables
    fused       torch's fused Adam, AdamW, SGD and Adagrad: their states, and no temporaries
    masters     any other optimizer over fp32 masters, and
    plain       over fp32 weights: its `step` is run on fake tensors, and what it allocates is counted

The first two need no run, because their states are known to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.layout import Layout
from halfstep.kernels.moments8 import BLOCK
from halfstep.kernels.table import CHUNK_BYTES, chunk_size, table_bytes
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.masters import Fp32Masters
from halfstep.optim.slabs import runs
from halfstep.planning.ranks.shards import Part

__all__ = ["StoredState", "plain_states", "run_plain", "states_after_step", "states_of", "step_scratch"]

_REFERENCE_COPIES = 6  # fp32 tensors of one parameter's size that the reference step has at once, at most


@dataclass(frozen=True)
class StoredState:
    """One tensor that stays allocated: its category, its size, and whether the first update allocates it or the Engine.

    `parts` are what sharding divides of it; the rest, such as step counts, every rank has. Lean optimizers' states have a
    dtype, by which they share slabs.
    """

    category: str
    num_bytes: int
    by_step: bool = True
    parts: tuple[Part, ...] = ()
    dtype: torch.dtype | None = None


def states_after_step(optimizer: Any, kind: str) -> list[StoredState]:
    """Everything a lean or fused optimizer has allocated after its first step, in the order of allocation."""
    if kind == "lean":
        return _lean(optimizer)
    return [
        state
        for group in optimizer.param_groups
        for param in _trainable(group)
        for state in _fused_states(group, param)
    ]


def _lean(optimizer: LeanOptimizer) -> list[StoredState]:
    layout, states = optimizer.layout, []
    by_kernels = all(optimizer.has_kernels(group) for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        for param in _trainable(group):
            master = layout.master_bytes(1, param.dtype)
            if master:
                states.append(_like("master", param, master, by_step=False, dtype=layout.master_dtype))
            if not by_kernels:
                states.append(StoredState("states", 4))  # the step count; the kernels have them in one table
            states += [StoredState("states", 4) for _ in optimizer.scalars]
            for name in optimizer.planned_moments(group):
                states += _moment(layout, name, param)
    states = [*_in_slabs([s for s in states if not s.by_step]), *_in_slabs([s for s in states if s.by_step])]
    if by_kernels:
        params = [p for group in optimizer.param_groups for p in _trainable(group)]
        chunk = chunk_size(layout.moment_dtype)
        chunks = tuple(Part("states", tuple(p.shape), CHUNK_BYTES, chunk) for p in params)
        size = table_bytes([p.numel() for p in params], layout.moment_dtype)
        states.append(StoredState("states", size, parts=chunks))
    return states


def _in_slabs(states: list[StoredState]) -> list[StoredState]:
    """The allocations of these entries, made at one time: large ones share slabs."""
    return [
        replace(run[0], num_bytes=sum(s.num_bytes for s in run), parts=tuple(part for s in run for part in s.parts))
        for run in runs(states, lambda state: state.num_bytes, lambda state: state.dtype)
    ]


def _moment(layout: Layout, name: str, param: Tensor) -> list[StoredState]:
    """The entries of one moment: its values, or 8-bit codes and the scales of their blocks."""
    block = BLOCK if layout.states == "8bit" else 1
    entries = zip(
        layout.moment_bytes(param.numel()), layout.moment_bytes(1), layout.dtypes_of_moment(name), strict=True
    )
    return [
        StoredState("states", size, parts=(Part("states", tuple(param.shape), block_bytes, block),), dtype=dtype)
        for size, block_bytes, dtype in entries
    ]


def _like(
    category: str, param: Tensor, element_bytes: int, *, by_step: bool = True, dtype: torch.dtype | None = None
) -> StoredState:
    """A state with an entry of this size for each element of a parameter."""
    part = Part(category, tuple(param.shape), element_bytes)
    return StoredState(category, param.numel() * element_bytes, by_step, (part,), dtype)


def _fused_states(group: dict[str, Any], param: Tensor) -> list[StoredState]:
    """The states of torch's fused optimizers, recognised by the settings of their groups."""
    size = param.element_size()
    if "betas" in group:
        return [StoredState("states", 4), *[_like("states", param, size)] * (3 if group.get("amsgrad") else 2)]
    if "momentum" in group:
        return [_like("states", param, size)] if group["momentum"] else []
    return [StoredState("states", 4, by_step=False), _like("states", param, size, by_step=False)]


def _trainable(group: dict[str, Any]) -> list[Tensor]:
    return [p for p in group["params"] if p.requires_grad]


def step_scratch(optimizer: Any, kind: str) -> int:
    """Bytes of temporaries while a lean or fused step runs; with kernels there are none."""
    groups = optimizer.param_groups
    if kind != "lean" or all(optimizer.has_kernels(group) for group in groups):
        return 0
    return _REFERENCE_COPIES * 4 * max((p.numel() for group in groups for p in group["params"]), default=0)


def run_plain(optimizer: torch.optim.Optimizer, run: Callable[[], None]) -> str:
    """Step a plain optimizer on fake tensors by `run`; the reason why it could not be traced, or nothing."""
    for group in optimizer.param_groups:
        if group.get("foreach", 0) is None:
            group["foreach"] = True  # torch's own choice on a GPU
    try:
        run()
    except Exception as error:
        return f"{type(optimizer).__name__}.step() could not be traced ({type(error).__name__}: {error})".split("\n")[0]
    return ""


def plain_states(optimizer: torch.optim.Optimizer) -> list[StoredState]:
    """What an optimizer that was stepped has in its state, and the masters that the Engine made before."""
    masters = isinstance(optimizer, Fp32Masters)
    states = []
    for param, entries in optimizer.state.items():
        for name, tensor in entries.items():
            if not isinstance(tensor, Tensor):
                continue
            category = "master" if masters and name == "master" else "states"
            # Entries of another shape, such as step counts and factored moments, are not sharded with the parameter.
            whole = tensor.shape == getattr(param, "shape", None)
            parts = (Part(category, tuple(tensor.shape), tensor.element_size()),) if whole else ()
            states.append(StoredState(category, tensor.nbytes, category == "states", parts))
    return states


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors in an optimizer's state."""
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
