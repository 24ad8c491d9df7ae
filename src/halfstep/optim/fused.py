"""Lean optimizers with kernels: one launch updates all tensors.

`FusedOptimizer` is `LeanOptimizer` with a rule that the Triton kernels implement; where they cannot run, the reference
does the step. `FusedStep` is the driver: tables from the optimizer's groups and states, and two or three launches.

Step counts are stored in one device vector, and each parameter's `state["step"]` is a view of its element, so that state
dicts look like torch's. The groups' settings are a small float64 table, copied from pinned memory when they change: the
learning rate may change between steps, also between replays of a captured CUDA graph.
"""

from __future__ import annotations

import itertools
import operator
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.layout import Rule
from halfstep.kernels.table import (
    LAUNCH_SHAPES,
    NUM_MOMENTS,
    NUM_SETTINGS,
    ChunkTable,
    Pointer,
    RecentTables,
    to_device,
)
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.shards import gradient_of, is_sharded, local
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["FusedOptimizer", "FusedStep"]

State = Mapping[str, Tensor]
Row = tuple[float, ...]
_DTYPES = (torch.float32, *DTYPES_16_BIT)
_REHEARSED = max(chunk for chunk, _ in LAUNCH_SHAPES.values()) + 1  # elements: a full chunk and a tail
_WITHOUT_MOMENTS = {Rule.SGD: Rule.PLAIN_SGD}
# Loops over parameters in C.
_address, _numel, _is_contiguous, _values = map(operator.methodcaller, ("data_ptr", "numel", "is_contiguous", "values"))
_dtype = operator.attrgetter("dtype")


class KernelSettings(Protocol):
    """A group's settings as a row of the kernels' table."""

    def row(self) -> Row: ...


class FusedOptimizer(LeanOptimizer):
    """A lean optimizer that the kernels can step: `rule` names the arithmetic, `settings` gives a group's numbers."""

    rule: ClassVar[Rule | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "update" in cls.__dict__ and "rule" not in cls.__dict__:
            cls.rule = None  # a subclass that changes the arithmetic must not be stepped by its parent's kernel

    @abstractmethod
    def settings(self, group: dict[str, Any]) -> KernelSettings:
        """A group's settings, for `update` and for the kernels."""

    def has_kernels(self, group: dict[str, Any]) -> bool:
        """Whether kernels step the parameters of this group on a GPU: those of at most two moments."""
        return self.rule is not None and len(self.moments_of(group)) <= NUM_MOMENTS

    def step_together(self, *, ready: bool) -> bool:
        """Step all parameters by kernels, on a GPU; whether it did.

        With `ready` only if nothing but the gradients' addresses has changed since the last such step, so that the usual
        step does not examine every tensor again.
        """
        if self.rule is None:
            return False
        fused: FusedStep | None = self.__dict__.get("_fused")
        if fused is None:
            fused = self._fused = FusedStep(self.rule, self.moments)
        if not ready:
            active = [(i, p) for i, g in enumerate(self.param_groups) for p in g["params"] if p.grad is not None]
            if not active:
                return True
            fused.prepare([p for _, p in active], self.state, [i for i, _ in active])
        elif not fused.is_ready([p for g in self.param_groups for p in g["params"]], self.state):
            return False
        return fused.step(self._rows(), getattr(self, "grad_scale", None), getattr(self, "found_inf", None))

    @torch.no_grad()
    def step_some(
        self, members: Sequence[tuple[dict[str, Any], Tensor]], found_inf: Tensor, tables: dict[Any, Any]
    ) -> None:
        """Update these (group, parameter) pairs of one device, or none if the flag is set: for updates inside backward.

        The launch's tables are stored in `tables`, and used again while the pairs are the same.
        """
        if self.rule is None:
            super().step_some(members, found_inf, tables)
            return
        params = [param for _, param in members]
        groups = list({id(group): group for group, _ in members}.values())
        fused: FusedStep | None = tables.get(self)
        if fused is None:
            fused = tables[self] = FusedStep(self.rule, self.moments)
        if not fused.is_ready(params, self.state):
            for param in params:
                self._check_supported(param)
            self.fill_states(members)
            number = {id(group): i for i, group in enumerate(groups)}
            fused.prepare(params, self.state, [number[id(group)] for group, _ in members])
        if not fused.step([self.settings(group).row() for group in groups], None, found_inf):
            for group, param in members:
                self._step_by_reference(group, param, None, found_inf)

    @torch.no_grad()
    def compile_kernels(self) -> None:
        """Compile the kernels of a step by one on a few zeros, for each dtype of these parameters; changes nothing here."""
        groups: dict[tuple[Any, ...], dict[str, Any]] = {}
        for group in self.param_groups:
            for param in group["params"] if self.rule is not None and self.has_kernels(group) else ():
                grad_dtype = getattr(param, "grad_dtype", None) or param.dtype
                if param.requires_grad and triton_runs_on(param.device):
                    groups.setdefault((param.device, param.dtype, grad_dtype), group)
        for (device, dtype, grad_dtype), group in groups.items():
            assert self.rule is not None
            twin = torch.zeros(_REHEARSED, dtype=dtype, device=device)
            state: dict[str, Any] = {}
            if grad_dtype is not dtype:
                twin.grad_dtype = grad_dtype
            twin.grad = torch.zeros(_REHEARSED, dtype=grad_dtype, device=device)
            self.fill_state(state, group, twin)
            fused = FusedStep(self.rule, self.moments)
            fused.prepare([twin], {twin: state}, [0])
            fused.step([self.settings(group).row()], None, None)

    def prepare_replay(self) -> None:
        """Make the groups' current settings visible to the next replay of a CUDA graph that contains a step."""
        fused = self.__dict__.get("_fused")
        if fused is None:
            raise SettingError(
                "prepare_replay() before any step: capture a step() of this optimizer in a CUDA graph first."
            )
        fused.prepare_replay(self._rows())

    def _rows(self) -> list[Row]:
        return [self.settings(group).row() for group in self.param_groups]


class FusedStep:
    """Steps many tensors at once; reuses its tables while the tensors stay the same.

    `rule` is the arithmetic, `moments` are the state entries of the optimizer, those that the kernel updates first.
    """

    def __init__(self, rule: Rule, moments: Sequence[str]) -> None:
        self._rule = rule
        self._moments, self._unsupported = tuple(moments[:NUM_MOMENTS]), frozenset(moments[NUM_MOMENTS:])
        self._params: list[Tensor] = []
        self._parts: list[Tensor] = []  # of the parameters, on this rank: they themselves, if they are not sharded
        self._is_sharded = False  # whether any is
        self._states: list[dict[str, Tensor]] = []
        self._state: Mapping[Tensor, Any] | None = None  # the optimizer's mapping that contains them
        self._addresses: list[int] = []  # and sizes of the weights, to notice `param.data = ...`
        self._stored: list[Any] = []  # the tensors of the states, to notice that one was replaced
        self._steps = self._group_of = self._settings = self._one = torch.empty(0)
        self._rows: list[Row] = []  # the settings on the device
        self._settings_host: Tensor | None = None
        self._pointers: np.ndarray | None = None  # int64 (T, len(Pointer)) on the host
        self._table = torch.empty(0)  # the same on the device
        self._planned_for: tuple[Any, ...] = ()
        self._launches: list[Any] = []
        self._recent: RecentTables[tuple[Tensor, tuple[Any, ...], list[Any]]] = RecentTables()  # the three above

    def prepare(self, params: list[Tensor], state: Mapping[Tensor, dict[str, Tensor]], group_of: Sequence[int]) -> None:
        """Build tables for these parameters, which all have gradients and complete states, and forget any others."""
        self._params = []
        states = [state[p] for p in params]
        self._is_sharded = any(map(is_sharded, params))
        parts = self._parts_of(params)
        if not self._supports(parts, states):
            return
        device = parts[0].device
        self._params, self._parts, self._states, self._state = params, parts, states, state
        self._addresses = _addresses(parts)
        self._steps = torch.stack([s["step"].to(device, torch.float32).reshape(()) for s in states])
        for own, view in zip(states, self._steps.unbind(), strict=True):
            own["step"] = view
        self._stored = [value for own in states for value in own.values()]
        self._group_of = to_device(np.asarray(group_of, dtype=np.int32), device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._pointers, self._planned_for, self._recent = None, (), RecentTables()

    def _parts_of(self, params: list[Tensor]) -> list[Tensor]:
        return [local(p) for p in params] if self._is_sharded else params

    def is_ready(self, params: list[Tensor], state: Mapping[Tensor, State]) -> bool:
        """Whether the same parameters have gradients as in the last step, with the same weights and states."""
        active = [p for p in params if p.grad is not None]
        return (
            state is self._state  # a loaded one is another object
            and len(active) == len(self._params)
            and all(map(operator.is_, active, self._params))
            and _addresses(self._parts_of(active)) == self._addresses
            and sum(map(len, self._states)) == len(self._stored)
            and all(map(operator.is_, itertools.chain.from_iterable(map(_values, self._states)), self._stored))
        )

    def step(self, rows: list[Row], divisor: Tensor | None, found_inf: Tensor | None) -> bool:
        """One step for all prepared parameters, with these settings per group; False if there are none."""
        if not self._params:
            return False
        from halfstep.kernels.lean_triton import prepare_factors

        device = self._parts[0].device
        self._refresh_settings(rows, device)
        grads: list[Any] = [gradient_of(p) if self._is_sharded else p.grad for p in self._params]
        if not self._refresh_pointers(grads, device):
            return False
        one = self._one if divisor is None else divisor.reshape(())
        flag = torch.zeros((), dtype=torch.float32, device=device) if found_inf is None else found_inf.reshape(())
        factors = prepare_factors(self._rule, self._settings, self._group_of, self._steps, one, flag)
        for launch in self._launches:
            launch(self._table, factors, self._steps, flag)
        return True

    def prepare_replay(self, rows: list[Row]) -> None:
        """Put new settings where a captured graph will read them at its next replay."""
        assert self._settings_host is not None
        self._settings_host.copy_(_settings_table(rows))

    def table_bytes(self) -> int:
        """Device bytes of the tables, the groups' settings aside."""
        chunks = [launch.chunks for launch in self._launches]
        tables = [self._table, self._steps, self._group_of]
        tables += [tensor for table in chunks for tensor in (table.rows, table.numels, table.bounds)]
        return sum(t.numel() * t.element_size() for t in tables)

    def _refresh_settings(self, rows: list[Row], device: torch.device) -> None:
        if device.type != "cuda":
            self._settings = _settings_table(rows)
            return
        capturing = torch.cuda.is_current_stream_capturing()
        if rows == self._rows and not capturing:
            return
        table = _settings_table(rows)
        if self._settings_host is None or self._settings_host.shape != table.shape:
            self._settings_host = torch.empty_like(table, pin_memory=True)
            self._settings = torch.empty_like(table, device=device)
        self._rows = rows
        if capturing:
            # The graph will read this very buffer at each replay; `prepare_replay` writes it.
            self._settings_host.copy_(table)
            self._settings.copy_(self._settings_host, non_blocking=True)
        else:
            # A fresh pinned buffer: the copy out of the last step's may still be in flight.
            self._settings.copy_(table.pin_memory(), non_blocking=True)

    def _refresh_pointers(self, grads: list[Tensor], device: torch.device) -> bool:
        """Choose the device's table for these gradients; one is copied there if the last few steps had none at their addresses."""
        if not all(map(_is_contiguous, grads)):
            self._params = []  # left to the reference
            return False
        key = (*map(_address, grads), *map(_dtype, grads))
        known = self._recent.get(key)
        if known is not None:
            self._table, self._planned_for, self._launches = known
            return True
        if not {g.dtype for g in grads} <= set(_DTYPES):
            self._params = []
            return False
        if self._pointers is None:
            rows = [self._pointer_row(p, s) for p, s in zip(self._parts, self._states, strict=True)]
            self._pointers = np.array(rows, dtype=np.int64)
        self._pointers = self._pointers.copy()  # on a CPU the array is the table, and earlier ones are remembered
        self._pointers[:, Pointer.GRAD] = key[: len(grads)]
        self._table = to_device(self._pointers, device)
        self._plan_launches(grads, device)
        self._recent.add(key, (self._table, self._planned_for, self._launches))
        return True

    def _plan_launches(self, grads: Sequence[Tensor], device: torch.device) -> None:
        """One launch per combination of dtypes; usually there is one."""
        from halfstep.kernels.lean_triton import LeanLaunch

        assert self._pointers is not None
        aligned = tuple((self._pointers % 16 == 0).all(axis=1).tolist())
        planned_for = ([g.dtype for g in grads], aligned)  # parameters and states are those of `prepare`
        if self._planned_for == planned_for:
            return
        self._planned_for = planned_for
        kinds = tuple(self._kind(g, p, s) for g, p, s in zip(grads, self._parts, self._states, strict=True))
        self._launches = []
        for kind in dict.fromkeys(kinds):
            # Tensors of other kinds count as empty here, so that a tensor has the same index in every table.
            sizes = [p.numel() if k == kind else 0 for p, k in zip(self._parts, kinds, strict=True)]
            rule, *dtypes = kind
            chunk, _ = LAUNCH_SHAPES[dtypes[-1]]
            self._launches.append(LeanLaunch(rule, ChunkTable(sizes, aligned, chunk, device), *dtypes))

    def _kind(self, grad: Tensor, param: Tensor, state: State) -> tuple[Any, ...]:
        """What the tensors of a launch must agree in: the rule, and the dtypes of gradient, weight, master, moments."""
        master = _master_entry(param, state)
        moment = state.get(self._moments[0])
        rule = _WITHOUT_MOMENTS[self._rule] if moment is None else self._rule
        return (rule, grad.dtype, param.dtype, getattr(master, "dtype", None), getattr(moment, "dtype", None))

    def _supports(self, params: Sequence[Tensor], states: Sequence[State]) -> bool:
        """Whether the kernels handle these tensors: one device, dense, no moments beyond those of the rule."""
        devices = {p.device for p in params}
        if len(devices) != 1 or not triton_runs_on(next(iter(devices))):
            return False
        return all(
            p.dtype in _DTYPES and p.is_contiguous() and not self._unsupported & s.keys()
            for p, s in zip(params, states, strict=True)
        )

    def _pointer_row(self, param: Tensor, state: State) -> list[int]:
        """The addresses of one tensor's row: the weight's where there is nothing, and for the gradient until it is known."""
        tensors: dict[Pointer, Tensor | None] = {Pointer.MASTER: _master_entry(param, state)}
        columns = ((Pointer.FIRST, Pointer.FIRST_SCALE), (Pointer.SECOND, Pointer.SECOND_SCALE))
        for name, (moment, scale) in zip(self._moments, columns, strict=False):
            tensors[moment] = state.get(name)
            tensors[scale] = state.get(f"{name}_scale", state.get(name))
        filled = [tensors.get(column) for column in Pointer]
        return [param.data_ptr() if tensor is None else tensor.data_ptr() for tensor in filled]


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    """The address of each tensor, then the number of elements of each."""
    return [*map(_address, tensors), *map(_numel, tensors)]


def _settings_table(rows: list[Row]) -> Tensor:
    """The groups' rows as the kernels' table, padded to its width."""
    return torch.tensor([(*row, *[0.0] * (NUM_SETTINGS - len(row))) for row in rows], dtype=torch.float64)


def _master_entry(param: Tensor, state: State) -> Tensor | None:
    """What is stored next to a 16-bit weight; an fp32 one is its own master, also if it was cast after it had another."""
    return state.get("low", state.get("master")) if param.dtype in DTYPES_16_BIT else None
