"""A policy carried out in a library's loop, in the two moments that its plugins get: when a model is set up, and when its optimizers are.

The model comes first, before the library moves it and wraps it (DistributedDataParallel registers the dtypes of what it reduces),
and without its optimizers. So the weights of lean presets are cast at once, and their fp32 values wait here for the optimizer that
takes them as masters.
"""

from __future__ import annotations

import contextlib
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.engine.casting import check_castable, check_patterns, sum_gradients_in_fp32
from halfstep.engine.checks import check_optimizers
from halfstep.engine.region.residual import check_residual
from halfstep.engine.setup import convert_model, lean_layout, switch_tf32
from halfstep.errors import SettingError
from halfstep.optim.masters import WithMasters, add_masters, check_masters, start_masters
from halfstep.optim.trainable import check_model
from halfstep.precision.policy import Policy

__all__ = ["Adoption"]


class Adoption:
    """Casts models to a policy, and gives their optimizers masters where it needs them, until `close()`."""

    def __init__(self, policy: Policy) -> None:
        if policy.compute == "fp8":
            raise SettingError(
                "precision fp8 is not implemented yet. Use bf16-lean, which stores weights the same way."
            )
        self.policy = policy
        self._undo = contextlib.ExitStack()
        self._masters: dict[Tensor, Tensor] = {}  # fp32 values of weights whose optimizer is not known yet
        self._adopted: WeakKeyDictionary[torch.optim.Optimizer, torch.optim.Optimizer] = WeakKeyDictionary()

    def convert(self, module: nn.Module, accumulate: int) -> None:
        """Cast the weights of lean presets, and wrap what computes in fp32."""
        check_model(module)
        check_patterns(module, self.policy)
        check_residual(module, self.policy)
        check_castable(module, self.policy)
        widens = self.policy.widens_grads(accumulate)
        if widens and _num_ranks() > 1:
            raise SettingError(
                f"{self.policy} with {accumulate} micro-batches per step sums gradients in fp32, and torch's DistributedDataParallel does not "
                f"reduce those of 16-bit weights. Use a preset with fp32 weights, or halfstep.Engine(backend='ddp')."
            )
        self._masters |= convert_model(module, self.policy, self._undo)
        if widens:
            sum_gradients_in_fp32([p for p in module.parameters() if p.requires_grad], self.policy)

    def adopt(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer itself, or the one with masters that has adopted it."""
        stepped = self._adopted.get(optimizer)
        if stepped is not None:
            return stepped
        check_optimizers([optimizer])
        switch_tf32(self.policy, optimizer.param_groups[0]["params"][0].device)
        layout, stepped = lean_layout(self.policy), optimizer
        if layout is not None:
            check_masters(optimizer, master=layout["master"], states=layout["states"])
            stepped = add_masters(optimizer, **layout)
        if isinstance(stepped, WithMasters):
            start_masters(stepped, self._master)
        self._adopted[optimizer] = stepped
        return stepped

    def close(self) -> None:
        """Unwrap the forwards; trained weights stay as they are."""
        self._undo.close()

    def _master(self, param: Tensor) -> Tensor | None:
        """The fp32 value of a weight where the library has put it, rank 0's on every rank, as its weights are."""
        value = self._masters.pop(param, None)
        if value is None:
            return None
        value = value.to(param.device)
        if _num_ranks() > 1:
            dist.broadcast(value, 0)
        return value


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
