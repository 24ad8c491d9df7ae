"""Set-up: a model, its optimizers and a policy turned into a run that is ready to step.

One function for the Engine, which trains with the result, and for the planner, which runs it on fake tensors and counts
bytes. In order, and nothing is changed before the checks have passed:

    check       optimizers own parameters of the model, each once, on one kind of device, and can be adopted
    cast        weights to the policy's dtype in place; their fp32 values become masters
    switch      TF32 on or off, where the policy computes in fp32 or TF32 on CUDA
    wrap        modules that compute in fp32, output layers of unaligned width, repeated blocks whose activations are
                recomputed; fp32 buffers of lean models
    adopt       a stock optimizer becomes a lean one where the policy needs masters or smaller states; any other gets fp32
                masters
    accumulate  fp32 gradients for 16-bit weights where a window has several micro-batches
    choose      how each optimizer is stepped: by our kernels, by torch's fused ones, or in plain torch
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.backends.base import Backend, unwrap
from halfstep.backends.single import SingleDevice
from halfstep.engine.casting import (
    cast_model,
    check_castable,
    check_patterns,
    fp32_buffers,
    fp32_row,
    fp32_units,
    sum_gradients_in_fp32,
    uncast_forwards,
    wrap_forwards,
)
from halfstep.engine.checks import check_optimizers, named_trainables
from halfstep.engine.compiling import GRAPH_MODES
from halfstep.engine.ownership import check_ownable, own_optimizers
from halfstep.engine.recompute import check_recomputable, check_recompute, recompute_blocks, recompute_row
from halfstep.engine.region.aligned import align_outputs
from halfstep.engine.region.inputs import round_inputs_once
from halfstep.engine.region.residual import check_residual, residual_row, widen_residual
from halfstep.engine.region.tables import recognise_tables
from halfstep.engine.repeats import repeated_blocks
from halfstep.engine.steps import StepPath, choose_path
from halfstep.errors import SettingError
from halfstep.hardware.onednn import ignore_fallback_warnings
from halfstep.hardware.tf32 import set_tf32
from halfstep.optim.adopt import adopt, adopts
from halfstep.optim.exchange import check_exchange, exchanging_of, join_ranks
from halfstep.optim.masters import WithMasters, add_masters, check_masters, start_masters
from halfstep.optim.shards import is_sharded
from halfstep.optim.trainable import check_model
from halfstep.precision.policy import Policy

__all__ = [
    "PreparedRun",
    "as_list",
    "check_module",
    "check_run",
    "convert_model",
    "lean_layout",
    "prepare_module",
    "prepare_run",
    "switch_tf32",
]


@dataclass(frozen=True)
class PreparedRun:
    """A module whose weights and optimizers fit a policy, and the way back."""

    module: nn.Module
    policy: Policy
    accumulate: int
    params: dict[str, Tensor]  # those that the optimizers own, by the model's names
    paths: tuple[StepPath, ...]
    undo: contextlib.ExitStack = field(repr=False)  # what Engine.close() takes back; trained weights stay
    rows: dict[str, str] = field(default_factory=dict)  # of the truth table, for options that have one

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers as they are stepped: the user's own, or those that adopted them."""
        return [path.optimizer for path in self.paths]

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.params.values())).device

    def master_of(self, param: Tensor) -> Tensor:
        """The fp32 value of a parameter."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, WithMasters) and param in optimizer.state:
                return optimizer.master_of(param)
        value = param.detach()
        return value.float() if value.is_floating_point() and value.element_size() < 4 else value


def check_run(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    policy: Policy,
    *,
    gradient_release: bool = False,
    recompute: str | float | None = None,
    shards: bool = False,
    owned: bool = False,
) -> None:
    """Raise for what `prepare_run` cannot train; changes nothing. The backend: `shards` parameters, or has `owned` optimizers."""
    if policy.compute == "fp8":
        raise SettingError("precision fp8 is not implemented yet. Use bf16-lean, which stores weights the same way.")
    check_optimizers(optimizers)
    check_model(module, shards=shards)
    named_trainables(module, optimizers)
    check_patterns(module, policy)
    check_residual(module, policy)
    check_recompute(recompute)
    check_recomputable(module, recompute)
    layout = None if owned else lean_layout(policy, always=gradient_release)
    if layout is not None:
        for optimizer in optimizers:
            check_masters(optimizer, **layout, release=gradient_release)
    check_ownable(optimizers, lean=layout is not None, release=gradient_release)


def prepare_run(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    policy: Policy,
    *,
    accumulate: int = 1,
    gradient_release: bool = False,
    recompute: str | float | None = None,
    compiled: bool = False,
    backend: Backend | None = None,
) -> PreparedRun:
    """Cast, wrap and adopt so that `module` trains under `policy`; raises before it changes anything."""
    shards, owned = backend is not None and backend.shards, backend is not None and backend.owns_optimizers
    options: dict[str, Any] = {"gradient_release": gradient_release, "recompute": recompute}
    check_run(module, optimizers, policy, shards=shards, owned=owned, **options)
    params, layout = named_trainables(module, optimizers), lean_layout(policy, always=gradient_release)
    undo = contextlib.ExitStack()
    masters = convert_model(module, policy, undo)
    switch_tf32(policy, next(iter(params.values())).device)
    recompute_blocks(module, recompute, undo, compiled=compiled)
    if backend is not None and owned:
        stepped = backend.own(module, optimizers)
    else:
        stepped = [_stepped(o, layout) for o in optimizers]
    for optimizer in stepped:
        if isinstance(optimizer, WithMasters):
            start_masters(optimizer, masters.get)
    if policy.widens_grads(accumulate) and not owned:
        sum_gradients_in_fp32(params.values(), policy)
    if backend is not None:
        backend.settle(widens=policy.widens_grads(accumulate))
    paths = tuple(choose_path(o, module) for o in stepped)
    own_optimizers(stepped, undo)
    if backend is not None and exchanging_of(stepped) is not None:
        context = backend.context()
        join_ranks(stepped, policy.compute, context.process_group if context.world_size > 1 else None, undo)
    rows = recompute_row(module, recompute, compiled=compiled) | residual_row(module, policy) | fp32_row(module, policy)
    return PreparedRun(module, policy, accumulate, params, paths, undo, rows)


def convert_model(module: nn.Module, policy: Policy, undo: contextlib.ExitStack) -> dict[Tensor, Tensor]:
    """Cast the weights and wrap the forwards that the policy changes; returns the fp32 values that were rounded, by parameter."""
    masters = cast_model(module, policy)
    if policy.compute in {"bf16", "fp16"}:
        ignore_fallback_warnings()  # the region does so too, but 16-bit weights may be multiplied outside of it
    wrap_forwards(module, policy)
    undo.callback(uncast_forwards, module)
    align_outputs(module, policy, undo)
    if policy.is_lean:
        widen_residual(module, policy, undo)
        round_inputs_once(module, policy, undo)
        undo.enter_context(recognise_tables(fp32_buffers(module, policy).values()))
    return masters


def switch_tf32(policy: Policy, device: torch.device) -> None:
    """Turn TF32 on or off where the policy computes in fp32 or TF32; process-wide, so nothing reverts it."""
    if policy.compute in {"fp32", "tf32"} and device.type == "cuda":
        set_tf32(policy.compute == "tf32")


def _stepped(optimizer: torch.optim.Optimizer, layout: dict[str, str] | None) -> torch.optim.Optimizer:
    """The optimizer that is stepped instead of the user's: one with masters, or one that knows sharded parameters."""
    if layout is not None:
        return add_masters(optimizer, **layout)
    # torch has a fused AdamW for DTensors, but not for several meshes and not for other rules.
    if adopts(optimizer) and any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        return adopt(optimizer, master="none", states="fp32")
    return optimizer


def check_module(backend: Backend, root: nn.Module, policy: Policy) -> None:
    """Raise if a backend cannot train a model; afterwards it knows the model's blocks and what stays in fp32."""
    module = unwrap(root)
    check_patterns(module, policy)
    wide, replicated = fp32_units(module, policy)
    backend.suggest_units([block for stack in repeated_blocks(module) for block in stack.modules], wide, replicated)
    backend.check(root, policy)


def prepare_module(
    backend: Backend,
    root: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    policy: Policy,
    compile: bool | str = False,  # noqa: A002 - the option's name
    **options: Any,
) -> nn.Module:
    """Check that the backend and `prepare_run` can train a model, then let the backend take it over; returns the module with the parameters.

    `options` are those of `check_run`: a rejection after the backend has sharded or synchronised the model would be too late.
    """
    module = unwrap(root)

    def check() -> None:
        if exchanging_of(optimizers) is not None:
            check_exchange(
                optimizers,
                policy.compute,
                backend=backend.name,
                sharded=backend.shards or backend.owns_optimizers,
                num_ranks=backend.context().world_size,
                group=backend.group_of(root),
                release=bool(options.get("gradient_release")),
            )
        check_module(backend, root, policy)
        if backend.shards and compile in GRAPH_MODES:
            raise SettingError(
                f"compile={compile!r} records CUDA graphs, whose addresses FSDP2 changes whenever it gathers and frees parameters. Use compile=True "
                'or compile="blocks".'
            )
        check_run(module, optimizers, policy, shards=backend.shards, owned=backend.owns_optimizers, **options)
        if backend.name != SingleDevice.name:  # which changes nothing before `cast_model` has checked the same
            check_castable(module, policy)

    backend.check_together(root, check)
    return backend.prepare(root, optimizers)


def as_list(value: Any) -> list[Any]:
    """One optimizer or scheduler, several of them, or None, as a list."""
    return [] if value is None else list(value) if isinstance(value, Sequence) else [value]


def lean_layout(policy: Policy, *, always: bool = False) -> dict[str, str] | None:
    """How lean optimizers store master and states under a policy; None where the user's optimizer steps as it is."""
    if not always and policy.params == "fp32" and policy.states == "fp32":
        return None
    return {"master": policy.master if policy.params != "fp32" else "none", "states": policy.states}
