"""The base of the lean optimizers: fp32 masters for 16-bit weights, gated steps, states that load from any layout.

A subclass gives its defaults, declares its states and implements one rule:

    class Momentum(LeanOptimizer):
        moments = ("momentum_buffer",)

        def __init__(self, params, lr=0.1, momentum=0.9, **layout):
            super().__init__(params, {"lr": lr, "momentum": momentum}, **layout)

        def update(self, group, state, master, grad):
            state["momentum_buffer"] = state["momentum_buffer"] * group["momentum"] + grad
            return master - group["lr"] * state["momentum_buffer"]

With only that it works in every preset and layout, in checkpoints, in the planner and with gradient release: this class
and `kernels.lean` read and write the stored tensors (`kernels.layout` has the formats), and the rule works on fp32 copies.
Kernels are an addition (`optim.fused`).

A step follows the protocol of torch's fused optimizers: if the attributes `grad_scale` and `found_inf` are set, every
gradient is divided by the first, and if the second is not 0 the step changes nothing, step counts included. The flag
stays on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.errors import SettingError, unknown
from halfstep.kernels.layout import MASTER_ENTRIES, Layout
from halfstep.kernels.lean import lean_step, read_master
from halfstep.optim.convert import convert, plain, without_steps
from halfstep.optim.shards import gradient_of, is_sharded, local, own_state, placed_as, share_of, whole_state
from halfstep.optim.slabs import gather
from halfstep.optim.trainable import check_trainable

__all__ = ["LeanOptimizer"]

MASTERS = ("policy", "split", "fp32", "none")
STATES = ("policy", "fp32", "bf16", "8bit")


class LeanOptimizer(torch.optim.Optimizer, ABC):
    """Base of the lean optimizers; a subclass declares its states and implements `update`."""

    moments: ClassVar[tuple[str, ...]] = ()  # every state entry that is shaped like the parameter
    scalars: ClassVar[tuple[str, ...]] = ()  # state entries of one fp32 number per parameter
    unsigned: ClassVar[frozenset[str]] = frozenset()  # moments that are never negative
    unstorable: ClassVar[Mapping[str, str]] = MappingProxyType(
        {}
    )  # values of `states` that are rejected, with the reason
    counts_steps: ClassVar[bool] = True  # whether torch's class of the same rule stores a step count as well
    elementwise: ClassVar[bool] = True  # whether `update` treats each element alone, so that it works on shards
    _step_supports_amp_scaling = True  # torch.amp.GradScaler leaves unscaling and skipping to step()
    _stock: torch.optim.Optimizer | None = None  # the adopted optimizer, which shares groups and state

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, master: str = "policy", states: str = "policy"
    ) -> None:
        if master not in MASTERS:
            raise unknown("master", master, MASTERS)
        if states not in STATES:
            raise unknown("states", states, STATES)
        self.master, self.states = master, states
        super().__init__(params, defaults)
        for group in self.param_groups:
            self.check_states(group, self.layout.states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do; a parameter that cannot be trained is rejected by name."""
        super().add_param_group(param_group)
        try:
            check_trainable(_named(self.param_groups[-1]), type(self).__name__, shards=self.elementwise)
        except SettingError:
            self.param_groups.pop()
            raise

    # --- the contract -----------------------------------------------------------------------------------------------

    @abstractmethod
    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """Return the new master of one parameter, and replace its moments in `state`.

        All tensors are fp32 and, but for scalars, have the parameter's shape; the gradient is unscaled and clipped, and `state["step"]` is the
        number of this step, from 1. No tensor may be changed in place.
        """

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The moments that the parameters of a group have: all, unless a subclass makes it depend on the settings."""
        return self.moments

    def planned_moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The moments that the parameters of a group have at most, at any time of a run; for the planner."""
        return self.moments_of(group)

    def initial_value(self, group: dict[str, Any], name: str) -> float:
        """What a moment or scalar is before the first step: 0, unless a subclass has another start."""
        return 0.0

    @classmethod
    def check_states(cls, group: dict[str, Any], states: str) -> None:  # noqa: ARG003 - for subclasses with options
        """Raise where the moments of a group cannot be stored as `states`: those of `unstorable`, by default."""
        if states in cls.unstorable:
            raise SettingError(
                f"{cls.__name__} cannot store its moments with states={states}: {cls.unstorable[states]}"
            )

    # --- the step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, or none at all if `found_inf` is set.

        A `closure` computes the gradients first, as with torch's optimizers; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss

    def _step_all(self) -> None:
        if self.step_together(ready=True):
            return
        active = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, param in active:
            self._check_supported(param)
        self.fill_states(active)
        if self.step_together(ready=False):
            return
        divisor, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group, param in active:
            self._step_by_reference(group, param, divisor, found_inf)

    def step_together(self, *, ready: bool) -> bool:
        """Step all parameters in one launch, if there are kernels for that; whether it did. See `optim.fused`."""
        return False

    def has_kernels(self, group: dict[str, Any]) -> bool:
        """Whether kernels step the parameters of this group on a GPU; elsewhere the reference does."""
        return False

    @torch.no_grad()
    def step_some(
        self, members: Sequence[tuple[dict[str, Any], Tensor]], found_inf: Tensor, tables: dict[Any, Any]
    ) -> None:
        """Update these (group, parameter) pairs of one device, or none if the flag is set: for updates inside backward.

        `tables` is a dictionary that the caller passes whenever it steps the same parameters; see `optim.fused`.
        """
        for _, param in members:
            self._check_supported(param)
        self.fill_states(members)
        for group, param in members:
            self._step_by_reference(group, param, None, found_inf)

    def _step_by_reference(
        self, group: dict[str, Any], param: Tensor, divisor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        update = partial(self.update, group)
        lean_step(local(param), gradient_of(param), self.state[param], self.layout, update, divisor, found_inf)

    def _check_supported(self, param: Tensor) -> None:
        assert param.grad is not None
        named = [(f"of shape {tuple(param.shape)}", param)]
        check_trainable(named, type(self).__name__, shards=self.elementwise)  # it may have been frozen before
        if param.grad.is_sparse or param.is_complex():
            kind = "sparse gradient" if param.grad.is_sparse else "complex parameter"
            raise SettingError(
                f"{type(self).__name__} does not support a {kind} of shape {tuple(param.shape)}; keep such a module in "
                "an fp32 preset with torch's own optimizer."
            )
        if param.dtype is torch.float64:
            raise SettingError(
                f"{type(self).__name__} works in fp32 and does not support an fp64 parameter of shape "
                f"{tuple(param.shape)}; use torch's own optimizer for it."
            )

    # --- states and masters -----------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """How masters and moments are stored; without an Engine, "policy" means a split master and fp32 moments."""
        master = "split" if self.master == "policy" else self.master
        states = "fp32" if self.states == "policy" else self.states
        return Layout(self.moments, self.unsigned, master, states, self.scalars)

    def fill_states(self, members: Sequence[tuple[dict[str, Any], Tensor]]) -> None:
        """Complete the states of these (group, parameter) pairs, large new entries in slabs."""

        def incomplete() -> Iterator[dict[str, Any]]:
            for group, param in members:
                state = self.state[param]
                num_entries = len(state)
                self.fill_state(state, group, local(param))
                if len(state) > num_entries:
                    yield state

        gather(incomplete())

    def fill_state(self, state: dict[str, Any], group: dict[str, Any], param: Tensor) -> None:
        """Add what the state of a parameter of this group lacks: step count, moments and the master of a 16-bit weight."""
        layout = self.layout
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in (*MASTER_ENTRIES, *self.moments):
            if name in state and state[name].numel() != param.numel():
                raise SettingError(
                    f"A parameter now has the shape {tuple(param.shape)}, but its state {name!r} has {tuple(state[name].shape)}: it was "
                    "resized after it was trained. Remove its state, optimizer.state.pop(param), or convert it yourself."
                )
        for name in self.moments_of(group):
            if name not in state:
                self.check_states(group, layout.states)
                start = torch.full_like(param, self.initial_value(group, name), dtype=torch.float32)
                state |= layout.pack(name, start, state["step"])
        for name in self.scalars:
            if name not in state:
                value = self.initial_value(group, name)
                state[name] = torch.full((), value, dtype=torch.float32, device=param.device)
        self._add_master(state, param, None)

    def start_master(self, param: Tensor, master: Tensor | None) -> None:
        """Store the master of a 16-bit weight, unless there is one already; None: the weight as it is."""
        self._add_master(self.state[param], local(param), share_of(param, master))

    def _add_master(self, state: dict[str, Any], param: Tensor, master: Tensor | None) -> None:
        layout = self.layout
        if layout.master_entry(param.dtype) is not None and not state.keys() & set(MASTER_ENTRIES):
            state |= layout.pack_master(param.detach().float() if master is None else master, param.dtype)[1]

    @torch.no_grad()
    def set_master(self, param: Tensor, master: Tensor) -> None:
        """Set a parameter to this fp32 value: its weight, and the rest of the master next to it."""
        state = self.state[param]
        weight, entries = self.layout.pack_master(share_of(param, master), param.dtype)
        local(param).copy_(weight)
        before = {name: state.pop(name) for name in MASTER_ENTRIES if name in state}
        for name, value in entries.items():
            stored = before.get(name, value)
            fits = (stored.shape, stored.dtype) == (value.shape, value.dtype)
            state[name] = stored.copy_(value) if fits else value  # in place: its part of a slab stays in use

    def master_of(self, param: Tensor) -> Tensor:
        """The fp32 value that the optimizer works on for `param`."""
        master = read_master(local(param), self.state.get(param, {}))
        return placed_as(param, master) if is_sharded(param) else master

    # --- saving and loading -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's optimizers return it; entries of a sharded parameter are DTensors (`optim.shards`)."""
        saved: dict[str, Any] = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in saved["param_groups"] for i in group["params"]]
        for index, param in zip(indices, params, strict=True):
            if is_sharded(param) and index in saved["state"]:
                saved["state"][index] = whole_state(saved["state"][index], param)
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of any layout, or torch's; moments and masters have this optimizer's layout afterwards."""
        groups, before = self.param_groups, self.state
        super().load_state_dict(state_dict)  # which casts moments to the weights' dtype: they are replaced below
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)  # schedulers of an adopted optimizer refer to these dictionaries
        self.param_groups = groups
        if self._stock is not None:
            self._stock.state = self.state
        saved = state_dict["state"]
        params = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        for index, param in zip(indices, params, strict=True):
            if index in saved:
                self.state[param] = convert(own_state(saved[index], param), local(param), self.layout)
            masters = {name: entry for name, entry in before.get(param, {}).items() if name in MASTER_ENTRIES}
            # Of torch's own state: the weights stay what they are. No empty entry is made: Accelerate loads a state before it
            # replaces the parameters by sharded ones, and an entry of the old ones could not be saved.
            if masters and not self.state[param].keys() & set(MASTER_ENTRIES):
                self.state[param] |= masters
        gather(self.state.values())

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as torch's class of the same name saves and loads it: fp32 moments, no masters.

        The weights to load with it are the masters: `master_of(param)`, or `halfstep export`.
        """
        saved = self.state_dict()
        entries = {index: plain(state, self.moments) for index, state in saved["state"].items()}
        return saved | {"state": entries if self.counts_steps else without_steps(entries)}

    def take_over(self, stock: torch.optim.Optimizer) -> None:
        """Share the groups and the state of a stock optimizer, converted to this layout; its schedulers keep working."""
        self.param_groups, self.defaults = stock.param_groups, stock.defaults
        for param in list(stock.state):  # torch's own state, or a lean one if it was adopted before
            self.state[param] = convert(own_state(stock.state.pop(param), param), local(param), self.layout)
        gather(self.state.values())
        self._stock, stock.state = stock, self.state

    def __repr__(self) -> str:
        return super().__repr__().replace(" (", f" (master={self.master}, states={self.states}", 1)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"master": self.master, "states": self.states}


def _named(group: dict[str, Any]) -> Iterable[tuple[str, Tensor]]:
    """The parameters of a group with their names, or their numbers where the optimizer was built without names."""
    params = group["params"]
    names = group.get("param_names") or [f"number {i} of its group" for i in range(len(params))]
    return zip(names, params, strict=True)
