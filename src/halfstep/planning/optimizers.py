"""What an optimizer allocates: states, masters, tables and temporaries, for each way of stepping.

    lean        halfstep.optim: moments and masters by the declared layout, and the kernels' tables
    fused       torch's fused Adam, AdamW, SGD and Adagrad: their states, and no temporaries
    masters     any other optimizer over fp32 masters, and
    plain       over fp32 weights: its `step` is run on fake tensors, and what it allocates is counted

The first two need no run, because their states are known to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.table import table_bytes
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.masters import Fp32Masters

__all__ = ["StoredState", "plain_states", "run_plain", "states_after_step", "states_of", "step_scratch"]

_REFERENCE_COPIES = 6  # fp32 tensors of one parameter's size that the reference step has at once, at most


@dataclass(frozen=True)
class StoredState:
    """One tensor that stays allocated: its category, its size, and whether the first update allocates it or the Engine."""

    category: str
    num_bytes: int
    by_step: bool = True


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
            master = layout.master_bytes(param.numel(), param.dtype)
            if master:
                states.append(StoredState("master", master, by_step=False))
            if not by_kernels:
                states.append(StoredState("states", 4))  # the step count; the kernels have them in one table
            states += [StoredState("states", 4) for _ in optimizer.scalars]
            for _ in optimizer.moments_of(group):
                states += [StoredState("states", size) for size in layout.moment_bytes(param.numel())]
    if by_kernels:
        sizes = [p.numel() for group in optimizer.param_groups for p in _trainable(group)]
        states.append(StoredState("states", table_bytes(sizes, layout.moment_dtype)))
    return states


def _fused_states(group: dict[str, Any], param: Tensor) -> list[StoredState]:
    """The states of torch's fused optimizers, recognised by the settings of their groups."""
    size = param.numel() * param.element_size()
    if "betas" in group:
        return [StoredState("states", 4), *[StoredState("states", size)] * (3 if group.get("amsgrad") else 2)]
    if "momentum" in group:
        return [StoredState("states", size)] if group["momentum"] else []
    return [StoredState("states", 4, by_step=False), StoredState("states", size, by_step=False)]


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
    entries = [item for state in optimizer.state.values() for item in state.items() if isinstance(item[1], Tensor)]
    masters = isinstance(optimizer, Fp32Masters)
    return [
        StoredState("master", tensor.nbytes, by_step=False)
        if masters and name == "master"
        else StoredState("states", tensor.nbytes)
        for name, tensor in entries
    ]


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors in an optimizer's state."""
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
