"""What an update did to the weights: its size relative to them, and the share that rounding removed.

A weight changes only if its update is at least half an ulp of it. With 7 fraction bits (bf16) that is 2^-9 to 2^-8 of the
weight, more than most updates late in a run, so weights stored in 16 bits without an fp32 master stop learning, silently, while
the loss merely flattens. What is seen here of an element with a gradient other than 0:

    lost     the value that the optimizer works on (the master, where there is one) is the same before and after the step
    stuck    it is also the same as at an earlier sample, several steps ago

`stuck` is the evidence: an element may lose one update and take the next, and stochastic rounding loses most on purpose, but what
has not moved in any of several steps is not learning.

At most 16,384 elements of each tensor are looked at, evenly spread by an odd stride, which visits every column of a matrix whose
width is a power of two. They are gathered into one vector per dtype, so that a sample costs a few launches for a model, not per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.layout import MASTER_ENTRIES
from halfstep.kernels.lean import read_master
from halfstep.kernels.table import copied_to
from halfstep.optim.shards import local
from halfstep.precision.formats import DTYPES_16_BIT, format_name

__all__ = ["MIN_STEPS", "NUM_COLUMNS", "UpdateProbe", "UpdateStats", "has_master", "spread"]

MOST_ELEMENTS = 16_384  # of a tensor; a share of 50 % is then known to within 1 % (two standard deviations)
MIN_STEPS = 6  # between the samples that `stuck` compares; samples 1, 8, 16, 32, 64 and so on then serve
_COLUMNS = ("change", "size", "moving", "lost", "stuck")  # sums of squares twice, then numbers of elements
NUM_COLUMNS = len(_COLUMNS)

# In the names of entries that extend a 16-bit weight: kahan_comp (optimi, pytorch-optimizer), compensation (AnyPrecisionAdamW), shift, ...
_MORE_BITS = ("master", "kahan", "comp", "shift", "residual", "error", "correction", "fp32", "low")

StateOf = Callable[[Tensor], Mapping[str, Any]]


@dataclass(frozen=True)
class UpdateStats:
    """One step's update of a tensor, as far as it was looked at."""

    name: str
    dtype: str  # of the stored weight
    master: bool  # whether more bits than those of a 16-bit weight are stored
    ratio: float  # norm of the change relative to the norm of the weights
    moving: int  # elements with a gradient other than 0
    lost: float  # share of those whose value did not change
    stuck: float | None  # share of those whose value has not changed since `since`; None without an earlier sample
    since: int | None  # a step

    @classmethod
    def from_row(cls, name: str, dtype: str, master: bool, row: Sequence[float], since: int | None) -> UpdateStats:
        """The values of a row of sums that `UpdateProbe.finish` returned."""
        change, size, moving, lost, stuck = row
        ratio = (change / size) ** 0.5 if size else float("nan") if change else 0.0
        return cls(
            name,
            dtype,
            master,
            ratio,
            int(moving),
            lost / moving if moving else 0.0,
            None if since is None else stuck / moving if moving else 0.0,
            since,
        )


def has_master(param: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether more bits than those of the weight are stored: it is fp32 itself, or its state has a master or a compensation.

    Compensations (Kahan summation) have no standard name, so an entry of the weight's size counts if its name looks like one.
    """
    return param.dtype not in DTYPES_16_BIT or any(
        name in MASTER_ENTRIES
        or (any(w in name.casefold() for w in _MORE_BITS) and local(value).numel() == local(param).numel())
        for name, value in state.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    )


def spread(tensor: Tensor) -> Tensor:
    """At most MOST_ELEMENTS elements of a tensor, evenly spread, in the order of its indices."""
    flat = tensor.detach().reshape(-1)
    stride = -(-flat.numel() // MOST_ELEMENTS)
    return flat[:: stride | 1] if stride > 1 else flat


class _Views:
    """What `spread` makes of a list of tensors, made again only for those whose memory has changed."""

    def __init__(self) -> None:
        self._views: dict[int, tuple[int, Tensor]] = {}

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        views = []
        for i, tensor in enumerate(tensors):
            address = tensor.data_ptr()
            known = self._views.get(i)
            if known is None or known[0] != address:
                view = spread(tensor)
                if view.data_ptr() == address:  # not a copy, as of a tensor with gaps
                    self._views[i] = address, view
            else:
                view = known[1]
            views.append(view)
        return views


class _Group:
    """Parameters of one device, dtype and kind of master."""

    def __init__(self, params: list[Tensor], entry: str | None) -> None:
        self.params = params
        self.entry = entry  # of the state, with the master
        self.counts = [_num_spread(local(p)) for p in params]
        lengths, device = torch.tensor(self.counts, dtype=torch.int64), params[0].device
        self.lengths = lengths.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else lengths
        self.weights, self.stored = _Views(), _Views()


class UpdateProbe:
    """Compares the values that an optimizer works on before and after its step.

    `state_of` returns the state of a parameter. `numels` are the sizes of whole tensors where `params` are parts of them; what has
    no elements is left out. `start` and `finish` surround an update; `finish` returns one row of sums per name of `names`, on
    the device.
    """

    def __init__(
        self, params: Mapping[str, Tensor], state_of: StateOf, numels: Mapping[str, int] | None = None
    ) -> None:
        sizes = {name: param.numel() for name, param in params.items()} if numels is None else numels
        self._params = {n: p for n, p in params.items() if p.is_floating_point() and sizes[n]}
        self._state_of = state_of
        self._old: list[Tensor] = []
        self._earlier: list[Tensor] | None = None
        self._earlier_step: int | None = None
        self._groups: list[_Group] = []
        self._keys: list[tuple[Any, ...]] = []
        self.names: list[str] = []
        self.dtypes: list[str] = []
        self.masters: list[bool] = []

    @torch.no_grad()
    def start(self) -> None:
        """Note the values before an update."""
        self._arrange()
        self._old = [self._values(group) for group in self._groups]

    @torch.no_grad()
    def finish(self, step: int, gradients: Mapping[str, Tensor]) -> tuple[Tensor, int | None]:
        """The sums of each tensor after the update, and the step that `stuck` is counted from.

        `gradients` are tensors, or what `spread` made of them. Once MIN_STEPS have passed, `stuck` is counted from this sample.
        """
        new = [self._values(group) for group in self._groups]
        since = self._earlier_step
        device = new[0].device
        moving = self._moving(gradients)
        rows = []
        for i, group in enumerate(self._groups):
            before, after, moves = self._old[i], new[i], moving[i]
            lost = moves & (before == after)
            stuck = lost & (self._earlier[i] == after) if self._earlier is not None else torch.zeros_like(lost)
            columns = ((after - before).square(), before.square(), moves.float(), lost.float(), stuck.float())
            rows.append(copied_to(_sums(columns, group.lengths), device))
        self._old = []
        if since is None or step - since >= MIN_STEPS:
            self._earlier, self._earlier_step = new, step
        return torch.cat(rows), since

    def __len__(self) -> int:
        return len(self._params)

    def _arrange(self) -> None:
        """Divide the parameters into groups, again if one has changed its kind: an optimizer may create masters at any time."""
        keys = []
        for param in self._params.values():
            state = self._state_of(param) if param.dtype in DTYPES_16_BIT else {}
            entry = next((e for e in MASTER_ENTRIES if e in state), None)
            keys.append((param.device, param.dtype, entry, has_master(param, state), local(param).numel()))
        if keys == self._keys:
            return
        groups: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
        for key, member in zip(keys, self._params.items(), strict=True):
            groups.setdefault(key[:4], []).append(member)
        members = [pair for group in groups.values() for pair in group]
        self.names = [name for name, _ in members]
        self.dtypes = [format_name(param.dtype) for _, param in members]
        self.masters = [key[3] for key, group in groups.items() for _ in group]
        self._groups = [_Group([param for _, param in group], key[2]) for key, group in groups.items()]
        self._keys, self._earlier, self._earlier_step = keys, None, None

    def _values(self, group: _Group) -> Tensor:
        """The values that the optimizer works on, in fp32 (fp64 weights: their own), as one vector."""
        weights = torch.cat(group.weights.of([local(p) for p in group.params]))
        if group.entry is None:
            return weights.float() if weights.dtype in DTYPES_16_BIT else weights
        stored = torch.cat(group.stored.of([local(self._state_of(p)[group.entry]) for p in group.params]))
        return read_master(weights, {group.entry: stored})

    def _moving(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Which elements have a gradient other than 0."""
        by_param = {id(self._params[name]): grad for name, grad in gradients.items() if name in self._params}
        moving = []
        for group in self._groups:
            parts = []
            for param, count in zip(group.params, group.counts, strict=True):
                grad = by_param.get(id(param))
                if grad is None or local(grad).is_sparse:
                    parts.append(torch.zeros(count, dtype=param.dtype, device=param.device))
                else:
                    part = local(grad)
                    parts.append(part if part.dim() == 1 and part.numel() == count else spread(part))
            moving.append(torch.cat(parts) != 0)
        return moving


def _num_spread(param: Tensor) -> int:
    stride = -(-param.numel() // MOST_ELEMENTS)
    return -(-param.numel() // (stride | 1)) if stride > 1 else param.numel()


def _sums(columns: Sequence[Tensor], lengths: Tensor) -> Tensor:
    """The sum of each column over each tensor's elements: (T, columns) in fp64."""
    sums = [torch.segment_reduce(c.to(torch.float32), "sum", lengths=lengths, unsafe=True) for c in columns]
    return torch.stack(sums, dim=1).to(torch.float64)
