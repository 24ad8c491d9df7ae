"""What an optimizer holds and takes: states, masters, tables and temporaries, for each way a step is made.

    lean        halfstep.optim: moments as the policy says, masters beside 16-bit weights, tables of the kernels
    fused       torch's fused Adam, AdamW, SGD and Adagrad: their states, and no temporaries
    plain       anything else: its `step` is run on fake tensors, and what it makes is counted

The first two need no run, because what they hold is known to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.engine.steps import choose_path
from halfstep.kernels.moments8 import num_blocks
from halfstep.optim.adopt import ADOPTS, adopt
from halfstep.optim.lean import LeanOptimizer
from halfstep.precision.formats import DTYPES_16_BIT, FORMATS
from halfstep.precision.policy import Policy

__all__ = ["Held", "held_by", "prepare_optimizer"]

_CHUNK, _ROW, _POINTERS = 256, 8, 56  # of the fused kernels' tables: elements, bytes of a row, bytes per tensor
_REFERENCE_COPIES = 6  # fp32 tensors of one parameter's size that the unfused lean step has at once, at most


@dataclass(frozen=True)
class Held:
    """One tensor that stays: what for, how large, and whether the update makes it or the Engine's start."""

    cause: str
    num_bytes: int
    by_step: bool = True


def prepare_optimizer(optimizer: torch.optim.Optimizer, policy: Policy, model: nn.Module) -> tuple[Any, str]:
    """The optimizer as the Engine would step it, and how: "lean", "fused" or "plain"."""
    if policy.params != "fp32" or policy.states != "fp32":
        master = policy.master if policy.params != "fp32" else "none"
        if isinstance(optimizer, LeanOptimizer) or type(optimizer) not in ADOPTS:
            return adopt(optimizer, master=master, states=policy.states), "lean"  # which refuses what it cannot take
        return ADOPTS[type(optimizer)](optimizer.param_groups, master=master, states=policy.states), "lean"
    if isinstance(optimizer, LeanOptimizer):
        return optimizer, "lean"
    path = choose_path(optimizer, model)
    return optimizer, path.kind


def held_by(optimizer: Any, kind: str) -> list[Held]:
    """Everything a lean or fused optimizer holds after its first step, in the order it is made."""
    found = []
    for group in optimizer.param_groups:
        for param in (p for p in group["params"] if p.requires_grad):
            if kind == "lean":
                found += _lean(optimizer, group, param)
            else:
                found += _fused(group, param)
    if kind == "lean":
        params = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        chunks = sum(-(-p.numel() // _CHUNK) for p in params)
        found.append(Held("states", _ROW * chunks + _POINTERS * len(params)))
    return found


def _lean(optimizer: LeanOptimizer, group: dict[str, Any], param: Tensor) -> list[Held]:
    numel = param.numel()
    found = []
    if param.dtype in DTYPES_16_BIT and optimizer.master != "none":
        found.append(Held("master", numel * (4 if optimizer.master == "fp32" else 2), by_step=False))
    for _ in optimizer.names(group):
        if optimizer.states == "8bit":
            found += [Held("states", numel), Held("states", 4 * num_blocks(numel))]
        else:
            states = "fp32" if optimizer.states == "policy" else optimizer.states
            found.append(Held("states", numel * int(FORMATS[states].bytes)))
    return found


def _fused(group: dict[str, Any], param: Tensor) -> list[Held]:
    if "betas" in group:
        moments = 3 if group.get("amsgrad") else 2
        return [Held("states", 4), *(Held("states", param.numel() * param.element_size()) for _ in range(moments))]
    if "momentum" in group:
        return [Held("states", param.numel() * param.element_size())] if group["momentum"] else []
    return [Held("states", 4, by_step=False), Held("states", param.numel() * param.element_size(), by_step=False)]


def step_scratch(optimizer: Any, kind: str) -> int:
    """Bytes that a lean or fused step takes while it runs."""
    unfused = [g for g in optimizer.param_groups if g.get("amsgrad")] if kind == "lean" else []
    return _REFERENCE_COPIES * 4 * max((p.numel() for g in unfused for p in g["params"]), default=0)


def run_plain(optimizer: torch.optim.Optimizer, run: Callable[[], None]) -> str:
    """Step a plain optimizer on fake tensors by `run`; what could not be traced, or nothing."""
    for group in optimizer.param_groups:
        if group.get("foreach", 0) is None:
            group["foreach"] = True  # what torch chooses on a GPU by itself
    try:
        run()
    except Exception as error:
        return f"{type(optimizer).__name__}.step() could not be traced ({type(error).__name__}: {error})".split("\n")[0]
    return ""


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors in an optimizer's state."""
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
