"""Backend: what changes when a run has more than one rank, as one list of hooks.

The Engine, the trainer and the planner call these hooks and know nothing else about ranks. Every hook is a no-op that is
right for one process, so a backend overrides only what differs:

    once              adapt -> compare -> check_together (suggest_units -> check) -> prepare -> context -> own -> settle
    each micro-batch  forward_context(last) around the forward, agree_reference -> backward(loss)
    each update       agree_reference -> reduce_gradients -> gradients -> norm_of (total_norm) -> reduce_weight -> agree -> step -> share_buffers
    each window       reset
    state             whole_weights around both, gather before saving, scatter before loading, ranks for who does it together
    always            local, truth_rows, close

`check` runs before anything is changed and raises for what the backend cannot do. `prepare` may replace the model's
parameters (FSDP2 does) and must then rebind the optimizers' groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.backends.context import RunContext
from halfstep.backends.parts import Parts
from halfstep.backends.ranks import Ranks
from halfstep.kernels.gradstats import total_norm
from halfstep.precision.policy import Policy

__all__ = ["Backend", "unwrap"]


class Backend:
    """The hooks, each a no-op that is right for one process."""

    name = "single"
    shards = False  # whether each rank may store and step a part of a parameter
    owns_optimizers = False  # whether `own` replaces the optimizers, with masters and gradients that the backend stores

    def __init__(self, context: RunContext | None = None) -> None:
        self._context = context or RunContext()

    # --- once ---------------------------------------------------------------------------------------------------

    def adapt(self, policy: Policy) -> Policy:
        """The policy as this backend carries it out; raises a SettingError for one that it cannot."""
        return policy

    def suggest_units(self, blocks: Sequence[nn.Module], fp32: Sequence[nn.Module], replicated: set[Tensor]) -> None:
        """The repeated blocks of the model, its modules that stay in fp32, and parameters that are not worth sharding."""

    def check(self, model: nn.Module, policy: Policy) -> None:
        """Raise a SettingError if this backend cannot train `model` under `policy`; nothing is changed yet."""

    def check_together(self, model: nn.Module, checks: Callable[[], None]) -> None:
        """Run the checks of a set-up, `check` among them; where they raise on one rank, all ranks must."""
        checks()

    def compare(self, settings: Mapping[str, Any]) -> None:
        """The Engine's settings by name, which must be the same on every rank; `prepare` may compare them with others."""

    def prepare(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
        """Make the model ready for this backend and return the module that owns the parameters.

        A backend that replaces parameters rebinds the optimizers' groups to the new ones, by name.
        """
        module = unwrap(model)
        first = next(module.parameters(), None)
        if first is not None:
            self._context = replace(self._context, device=first.device)
        return module

    def own(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """The optimizers that stand for the user's, once the weights have the policy's dtypes; called with `owns_optimizers` only."""
        return list(optimizers)

    def settle(self, *, widens: bool) -> None:
        """The weights have the policy's dtypes now; `widens` if 16-bit ones have fp32 gradients."""

    def group_of(self, model: nn.Module) -> Any:
        """The process group that `prepare` will train this model on; None where it is not known before."""
        return self._context.process_group

    def context(self) -> RunContext:
        """Rank, world size, local rank, device and process group of this process."""
        return self._context

    # --- each micro-batch ---------------------------------------------------------------------------------------

    def forward_context(self, *, last: bool) -> AbstractContextManager[None]:
        """Entered around a forward; `last` is False if its gradients need not be reduced over ranks yet."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Backpropagate a loss that is already scaled."""
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def agree_reference(self, reference: float | Tensor, *, weighted: bool, closing: bool) -> float | Tensor:
        """The unit of the window's weights, which must be the same on every rank when gradients are reduced.

        Called before each backward, and with `closing` when the window ends. `weighted` is whether weights were passed in
        this window. Returns `reference` itself where nothing is about to be reduced.
        """
        return reference

    def retained_gradients(self) -> list[Tensor]:
        """Gradients of this window that are not `param.grad` yet, as plain tensors that may be multiplied in place."""
        return []

    # --- each update --------------------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Reduce the gradients that no backward of this window has reduced."""

    def gradients(self) -> dict[str, Tensor] | None:
        """The reduced gradients by name, where this rank's parts are not in `param.grad`; else None."""
        return None

    def parts(self) -> Parts | None:
        """What this rank steps, where it is in neither the parameters nor the states of the optimizers; else None."""
        return None

    def reduce_weight(self, weight: float | Tensor) -> float | Tensor:
        """The weight of a window, agreed over ranks; gradients are divided by it."""
        return weight

    def norm_of(self, gradients: Mapping[str, Tensor], weight: float | Tensor, tables: dict[Any, Any]) -> Tensor:
        """The 2-norm of all gradients of all ranks, from those that this rank stores.

        `weight` is the window's, before `reduce_weight`: a backend may send both in one message. `tables` are of the kernel.
        """
        return self.total_norm(total_norm(list(gradients.values()), self.context().device, tables))

    def total_norm(self, partial: Tensor) -> Tensor:
        """The 2-norm of all gradients, from the norm of those that this rank stores."""
        return partial

    def agree(self, found_inf: Tensor) -> Tensor:
        """The flag, the same on every rank: 1 if any rank saw a non-finite gradient."""
        return found_inf

    @property
    def overflowed_ranks(self) -> tuple[int, ...]:
        """The ranks whose own gradients of the last update were not finite, where the backend knows it; may wait for the device."""
        return ()

    def watch_overflows(self, *, enabled: bool) -> None:
        """Whether `overflowed_ranks` is asked for from now on; for backends where it costs something."""

    @property
    def replay_obstacle(self) -> str | None:
        """Why one rank cannot compute a step again without the others; None if it can."""
        num_ranks = self.context().world_size
        return (
            None
            if num_ranks == 1
            else f"the step ran on {num_ranks} ranks, and a replay on one would wait for the others"
        )

    def step(self, optimizer: torch.optim.Optimizer, decision: Any) -> bool:
        """Take the step of an optimizer that this backend owns; False leaves it to the Engine."""
        return False

    def share_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Make the model's buffers the same on every rank, after an update; called with more than one rank only."""

    def reset(self) -> None:
        """The window ended and its gradients were dropped, after an update or without one."""

    def drop_copies(self) -> None:
        """The weights were changed, or are about to be, other than by an update: forget copies of them."""

    # --- state --------------------------------------------------------------------------------------------------

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter, gradient or state that this rank stores, as a plain tensor."""
        return tensor

    def whole_weights(self, *, write: bool = False) -> AbstractContextManager[None]:
        """Inside this block parameters are whole, on every rank; with `write`, values set there stay."""
        return contextlib.nullcontext()

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state of this rank as it is written to a checkpoint."""
        return state

    def scatter(self, state: dict[str, Any]) -> dict[str, Any]:
        """The part of a checkpoint's state that this rank loads."""
        return state

    def ranks(self) -> Ranks:
        """The ranks that save and load a checkpoint together, always the same object; this process alone where it has no others.

        With several, `Engine.save` and `Engine.load` are called on every rank.
        """
        return Ranks()

    def truth_rows(self) -> Mapping[str, str]:
        """Rows of the truth table that this backend knows better, by their name."""
        return {}

    def close(self) -> None:
        """Release what the backend allocated; calling it twice is fine."""


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module behind the wrappers of torch.compile and DistributedDataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner
