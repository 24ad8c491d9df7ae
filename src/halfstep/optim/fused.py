"""The driver of the fused step: tables from the optimizer's groups and states, two or three launches for all.

Step counts live in one device vector, and each parameter's `state["step"]` is a view of its place in it, so that state
dicts look like torch's. The groups' settings are a small float64 table, copied from pinned memory at every step: the
learning rate may change between steps, also between replays of a captured CUDA graph.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.table import ChunkTable, to_device
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["FusedStep"]

State = Mapping[str, Tensor]
_DTYPES = (torch.float32, *DTYPES_16_BIT)


class FusedStep:
    """Steps many tensors at once; keeps its tables while the tensors stay the same.

    `rule` names the arithmetic ("adam", "sgd", "lion"), `moments` the state entries it works on.
    """

    def __init__(self, rule: str, moments: Sequence[str]) -> None:
        self._rule, self._moments = rule, tuple(moments)
        self._params: list[Tensor] = []
        self._states: list[dict[str, Tensor]] = []
        self._state: Mapping[Tensor, Any] | None = None  # the optimizer's, which holds them
        self._addresses: list[int] = []  # of the weights, to notice `param.data = ...`
        self._views: list[Tensor] = []
        self._steps = self._group_of = self._hyper = torch.empty(0)
        self._settings: list[tuple[float, ...]] = []
        self._hyper_host: Tensor | None = None
        self._pointers: np.ndarray | None = None  # int64 (T, 7) on the host
        self._table = torch.empty(0)  # the same on the device
        self._kinds: tuple[Any, ...] = ()
        self._launches: list[Any] = []

    def prepare(self, params: list[Tensor], state: Mapping[Tensor, dict[str, Tensor]], group_of: Sequence[int]) -> None:
        """Take over these parameters, which all have gradients and whole states; forget the others."""
        self._params = []
        states = [state[p] for p in params]
        if not self._takes(params, states):
            return
        device = params[0].device
        self._params, self._states, self._state = params, states, state
        self._addresses = [p.data_ptr() for p in params]
        self._steps = torch.stack([s["step"].to(device, torch.float32).reshape(()) for s in states])
        self._views = list(self._steps.unbind())
        for own, view in zip(states, self._views, strict=True):
            own["step"] = view
        self._group_of = to_device(np.asarray(group_of, dtype=np.int32), device)
        self._pointers, self._kinds = None, ()

    def is_ready(self, params: list[Tensor], state: Mapping[Tensor, State]) -> bool:
        """Whether the same parameters have gradients as in the last step, with the same weights and states."""
        active = [p for p in params if p.grad is not None]
        return (
            state is self._state  # a loaded one is another object
            and len(active) == len(self._params)
            and all(map(operator.is_, active, self._params))
            and [p.data_ptr() for p in active] == self._addresses
            and all(s["step"] is v for s, v in zip(self._states, self._views, strict=True))
        )

    def step(self, settings: list[tuple[float, ...]], divisor: Tensor | None, found_inf: Tensor | None) -> bool:
        """One step for all prepared parameters; False if there are none."""
        if not self._params:
            return False
        from halfstep.kernels.lean_triton import prepare_factors

        device = self._params[0].device
        self._refresh_hyper(settings, device)
        grads: list[Tensor] = [p.grad for p in self._params]  # type: ignore[misc]
        if not self._refresh_pointers(grads, device):
            return False
        one = torch.ones((), dtype=torch.float32, device=device) if divisor is None else divisor.reshape(())
        flag = torch.zeros((), dtype=torch.float32, device=device) if found_inf is None else found_inf.reshape(())
        factors = prepare_factors(self._rule, self._hyper, self._group_of, self._steps, one, flag)
        for launch in self._launches:
            launch(self._table, factors, self._steps, flag)
        return True

    def _refresh_pointers(self, grads: list[Tensor], device: torch.device) -> bool:
        """Bring the device's table up to date; copied only if an address changed."""
        addresses = np.array([g.data_ptr() for g in grads], dtype=np.int64)
        if self._pointers is not None and np.array_equal(addresses, self._pointers[:, 0]):
            return True
        if not all(g.is_contiguous() and g.dtype in _DTYPES for g in grads):
            self._params = []  # strided gradients: the reference takes them
            return False
        if self._pointers is None:
            self._pointers = np.array(
                [self._row(p, s) for p, s in zip(self._params, self._states, strict=True)], dtype=np.int64
            )
        self._pointers[:, 0] = addresses
        self._table = to_device(self._pointers, device)
        self._plan(grads, device)
        return True

    def _refresh_hyper(self, settings: list[tuple[float, ...]], device: torch.device) -> None:
        if device.type != "cuda":
            self._hyper = torch.tensor(settings, dtype=torch.float64)
            return
        capturing = torch.cuda.is_current_stream_capturing()
        if settings == self._settings and not capturing:
            return
        rows = torch.tensor(settings, dtype=torch.float64)
        if self._hyper_host is None or self._hyper_host.shape != rows.shape:
            self._hyper_host = torch.empty_like(rows, pin_memory=True)
            self._hyper = torch.empty_like(rows, device=device)
        self._settings = settings
        if capturing:
            # The graph will read this very buffer at each replay; `prepare_replay` writes it.
            self._hyper_host.copy_(rows)
            self._hyper.copy_(self._hyper_host, non_blocking=True)
        else:
            # A fresh pinned buffer: the one of the last step may still be on its way.
            self._hyper.copy_(rows.pin_memory(), non_blocking=True)

    def prepare_replay(self, settings: list[tuple[float, ...]]) -> None:
        """Put new settings where a captured graph will read them at its next replay."""
        assert self._hyper_host is not None
        self._hyper_host.copy_(torch.tensor(settings, dtype=torch.float64))

    def _plan(self, grads: Sequence[Tensor], device: torch.device) -> None:
        """One launch per combination of dtypes; usually there is one."""
        from halfstep.kernels.lean_triton import LeanLaunch, chunk_of

        assert self._pointers is not None
        aligned = tuple((self._pointers % 16 == 0).all(axis=1).tolist())
        kinds = tuple(self._kind(g, p, s) for g, p, s in zip(grads, self._params, self._states, strict=True))
        if self._kinds == (kinds, aligned):
            return
        self._kinds = (kinds, aligned)
        self._launches = []
        for kind in dict.fromkeys(kinds):
            # Tensors of other kinds count as empty here, so that rows have the same number in every table.
            sizes = [p.numel() if k == kind else 0 for p, k in zip(self._params, kinds, strict=True)]
            rule, *dtypes = kind
            self._launches.append(LeanLaunch(rule, ChunkTable(sizes, aligned, chunk_of(dtypes[-1]), device), *dtypes))

    def _kind(self, grad: Tensor, param: Tensor, state: State) -> tuple[Any, ...]:
        """What a launch must agree in: the rule, and the dtypes of gradient, weight, what is held beside it, moments."""
        held = _held(state, param)
        moment = state.get(self._moments[0])
        rule = f"plain_{self._rule}" if moment is None else self._rule
        return (rule, grad.dtype, param.dtype, None if held is param else held.dtype, getattr(moment, "dtype", None))

    def _takes(self, params: Sequence[Tensor], states: Sequence[State]) -> bool:
        """Whether the kernels handle these tensors: one device, dense, no moments beyond those of the rule."""
        devices = {p.device for p in params}
        if len(devices) != 1 or not triton_runs_on(next(iter(devices))):
            return False
        return all(
            p.dtype in _DTYPES and p.is_contiguous() and "max_exp_avg_sq" not in s
            for p, s in zip(params, states, strict=True)
        )

    def _row(self, param: Tensor, state: State) -> list[int]:
        """The addresses of one tensor's row, the weight's own where there is nothing; the gradient's is filled in later."""
        names = (*self._moments, *[""] * (2 - len(self._moments)))
        places = [param, _held(state, param), *(state.get(n, param) for n in names)]
        places += [state.get(f"{n}_scale", state.get(n, param)) for n in names]
        return [0, *(t.data_ptr() for t in places)]


def _held(state: State, param: Tensor) -> Tensor:
    """What is held beside a weight; the weight itself where nothing is."""
    return state.get("low", state.get("master", param))
