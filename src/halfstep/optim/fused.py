"""The driver of the fused Adam step: tables from the optimizer's groups and states, two or three launches for all.

Step counts live in one device vector, and each parameter's `state["step"]` is a view of its place in it, so that state
dicts look like torch's. The groups' settings are a small float64 table, copied from pinned memory at every step: the
learning rate may change between steps, also between replays of a captured CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.table import ChunkTable, PointerTable, to_device

__all__ = ["FusedAdam"]

State = Mapping[str, Tensor]
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


class FusedAdam:
    """Steps many tensors at once; keeps its tables while the tensors stay the same."""

    def __init__(self) -> None:
        self._pointers = PointerTable()
        self._ids: tuple[int, ...] = ()
        self._views: list[Tensor] = []
        self._steps = self._group_of = self._hyper = torch.empty(0)
        self._hyper_host: Tensor | None = None
        self._layout: tuple[Any, ...] = ()
        self._launches: list[Any] = []

    @staticmethod
    def takes(params: Sequence[Tensor], states: Sequence[State]) -> bool:
        """Whether the kernels handle these tensors: one device, dense, no amsgrad."""
        devices = {p.device for p in params}
        if len(devices) != 1 or not triton_runs_on(next(iter(devices))):
            return False
        return all(
            p.dtype in _WEIGHTS
            and p.is_contiguous()
            and p.grad is not None
            and p.grad.dtype in _WEIGHTS
            and "max_exp_avg_sq" not in s
            for p, s in zip(params, states, strict=True)
        )

    def step(
        self,
        params: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        groups: Sequence[Sequence[float]],  # a row of settings per group, in the order of HYPER
        group_of: Sequence[int],
        divisor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """One Adam step for all parameters, which all have gradients."""
        from halfstep.kernels.adamw_triton import prepare_factors

        device = params[0].device
        self._own_steps(params, states, group_of)
        self._refresh_hyper(groups, device)
        one = torch.ones((), dtype=torch.float32, device=device) if divisor is None else divisor
        flag = torch.zeros((), dtype=torch.float32, device=device) if found_inf is None else found_inf
        grads = [p.grad.contiguous() for p in params]  # type: ignore[union-attr]
        columns = (
            grads,
            params,
            [_held(s, p) for p, s in zip(params, states, strict=True)],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [s.get("exp_avg_scale", s["exp_avg"]) for s in states],
            [s.get("exp_avg_sq_scale", s["exp_avg_sq"]) for s in states],
        )
        pointers = self._pointers.refresh(*columns)
        self._plan(grads, params, states, device)
        factors = prepare_factors(self._hyper, self._group_of, self._steps, flag.reshape(()))
        for launch in self._launches:
            launch(pointers, factors, self._steps, one.reshape(()), flag.reshape(()))

    def _own_steps(
        self, params: Sequence[Tensor], states: Sequence[dict[str, Tensor]], group_of: Sequence[int]
    ) -> None:
        """Make every `state["step"]` a view of one vector, unless they are already."""
        ids = tuple(id(p) for p in params)
        if ids == self._ids and all(s["step"] is v for s, v in zip(states, self._views, strict=True)):
            return
        device = params[0].device
        self._ids = ids
        self._steps = torch.stack([s["step"].to(device, torch.float32).reshape(()) for s in states])
        self._views = list(self._steps.unbind())
        for state, view in zip(states, self._views, strict=True):
            state["step"] = view
        self._group_of = to_device(np.asarray(group_of, dtype=np.int32), device)
        self._layout = ()

    def _refresh_hyper(self, groups: Sequence[Sequence[float]], device: torch.device) -> None:
        rows = torch.tensor(groups, dtype=torch.float64)
        if device.type != "cuda":
            self._hyper = rows
            return
        if self._hyper_host is None or self._hyper_host.shape != rows.shape:
            self._hyper_host = torch.empty_like(rows, pin_memory=True)
            self._hyper = torch.empty_like(rows, device=device)
        if torch.cuda.is_current_stream_capturing():
            # The graph will read this very buffer at each replay; the caller refreshes it with `prepare_replay`.
            self._hyper_host.copy_(rows)
            self._hyper.copy_(self._hyper_host, non_blocking=True)
        else:
            # A fresh pinned buffer: the one of the last step may still be on its way.
            self._hyper.copy_(rows.pin_memory(), non_blocking=True)

    def prepare_replay(self, groups: Sequence[Sequence[float]]) -> None:
        """Put new settings where a captured graph will read them at its next replay."""
        assert self._hyper_host is not None
        self._hyper_host.copy_(torch.tensor(groups, dtype=torch.float64))

    def _plan(
        self, grads: Sequence[Tensor], params: Sequence[Tensor], states: Sequence[State], device: torch.device
    ) -> None:
        """One launch per combination of dtypes; usually there is one."""
        from halfstep.kernels.adamw_triton import CHUNK, AdamLaunch

        kinds = tuple(
            (g.dtype, p.dtype, None if _held(s, p) is p else _held(s, p).dtype, s["exp_avg"].dtype)
            for g, p, s in zip(grads, params, states, strict=True)
        )
        aligned = self._pointers.aligned()
        if self._layout == (kinds, aligned):
            return
        self._layout = (kinds, aligned)
        self._launches = []
        for kind in dict.fromkeys(kinds):
            # Tensors of other kinds count as empty here, so that rows have the same number in every table.
            sizes = [p.numel() if k == kind else 0 for p, k in zip(params, kinds, strict=True)]
            self._launches.append(AdamLaunch(ChunkTable(sizes, aligned, CHUNK, device), *kind))


def _held(state: State, param: Tensor) -> Tensor:
    """What is held beside a weight; the weight itself where nothing is."""
    return state.get("low", state.get("master", param))
