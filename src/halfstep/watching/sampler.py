"""Takes the samples of one set of parameters: those of an Engine, or of one optimizer in another loop.

Around a sampled step:

    before   count the exponents of gradients and weights, one launch each; note the values that the optimizer works on
    after    compare those values with the new ones; send everything to the host as one vector, behind an event
    later    `deliver` unpacks the vectors that have arrived

Of sharded parameters each rank counts its part, and `after` combines them (`watching.shards`). Where a rank steps parts that are
not in the parameters (ZeRO), `parts` has them: they are what is counted and compared instead of the weights.

With gradient release the gradients are gone when the step is closed, and the weights updated: `arm`, before the forward, notes the
values, and a hook on each parameter counts its gradient as it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.exponents import NUM_COLUMNS, count_exponents
from halfstep.kernels.gradstats import dense_values
from halfstep.optim.shards import local
from halfstep.precision.formats import format_name
from halfstep.scaling.readback import Readback
from halfstep.watching.activations import ActivationTable
from halfstep.watching.cost import DeviceClock
from halfstep.watching.sample import Header, Sample
from halfstep.watching.shards import ShardStatistics
from halfstep.watching.updates import NUM_COLUMNS as NUM_UPDATE_COLUMNS
from halfstep.watching.updates import UpdateProbe, UpdateStats, spread

__all__ = ["Sampler", "is_due", "num_nonfinite"]

_LAST_EARLY = 64


def is_due(step: int, every: int) -> bool:
    """Whether a step is sampled: 1, 2, 4, ... 64, and every `every` steps."""
    return step > 0 and (step % every == 0 or (step <= _LAST_EARLY and step & (step - 1) == 0))


@dataclass
class _Open:
    """A sample between `before` and its arrival."""

    step: int
    gradients: Header
    weights: Header
    parts: list[Tensor]  # int64 on the device, in the order of unpacking
    idle: frozenset[str]
    activations: Header = field(default_factory=Header)
    probe: tuple[list[str], list[str], list[bool]] = ((), (), ())  # type: ignore[assignment]
    since: int | None = None
    clocks: list[DeviceClock] = field(default_factory=list)


class Sampler:
    """Samples the parameters `params`, whose optimizer states `state_of` returns."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        state_of: Callable[[Tensor], Mapping[str, Any]],
        *,
        gradients: bool,
        weights: bool,
        shards: ShardStatistics | None = None,
        parts: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`shards` combines the statistics of sharded parameters over ranks."""
        self.params, self._gradients, self._weights = dict(params), gradients, weights
        self.shards, self._has_parts = shards, parts is not None
        self._values = self.params if parts is None else dict(parts)
        self._probe = UpdateProbe(self._values, state_of, None if shards is None else shards.numels)
        self._tables: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})  # of gradients, of weights
        self._readback, self._open = Readback(), None
        self._released: dict[str, tuple[Tensor, Tensor]] = {}
        self._hooks: list[Any] = []
        self._is_armed = False
        self._armed_clocks: list[DeviceClock] = []
        self.seconds: list[float] = []  # of the samples that have arrived

    _open: _Open | None

    # --- gradient release -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def arm(self) -> None:
        """Prepare for a step that updates the weights inside backward."""
        if self._is_armed:
            self.disarm()
        self._is_armed = True
        clock = DeviceClock(next(iter(self.params.values())).device)
        self._probe.start()
        self._armed_weights = self._count_weights()
        clock.stop()
        self._armed_clocks = [clock]
        for name, param in self.params.items():
            if param.requires_grad:
                self._hooks.append(param.register_hook(self._release_hook(name)))  # type: ignore[no-untyped-call]

    def disarm(self) -> None:
        """Forget a step that was prepared for."""
        for handle in self._hooks:
            handle.remove()
        self._hooks, self._released, self._is_armed, self._armed_clocks = [], {}, False, []

    def _release_hook(self, name: str) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def hook(grad: Tensor) -> None:
            clock = DeviceClock(grad.device)
            self._released[name] = (count_exponents([grad]).table, spread(grad).clone())
            clock.stop()
            self._armed_clocks.append(clock)

        return hook

    # --- a sampled step ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before(self, step: int, gradients: Mapping[str, Tensor], divisor: Tensor | None, idle: frozenset[str]) -> None:
        """Begin the sample of a step, before its update."""
        device = next(iter(self.params.values())).device
        clock, clocks = DeviceClock(device), self._armed_clocks
        parts: list[Tensor] = []
        rows, weights = Header(), Header()
        if self._is_armed:
            self._spreads: Mapping[str, Tensor] = {name: values for name, (_, values) in self._released.items()}
            if self._gradients and self._released:
                names = tuple(self._released)
                rows = self._rows(names, [self.params[name] for name in names])
                parts += [torch.cat([self._released[name][0].to(device) for name in names])]
            weights, table = self._armed_weights
            parts += [table] if table is not None else []
            self.disarm()
        else:
            # A backend with parts may clear its gradients in its step.
            copies = {name: spread(grad).clone() for name, grad in gradients.items()} if self._has_parts else {}
            self._spreads = copies or gradients
            if self._gradients and gradients:
                rows = self._rows(tuple(gradients), [dense_values(g) for g in gradients.values()])
                rows = self._of_whole(rows)
                parts += [count_exponents(list(gradients.values()), divisor, self._tables[0]).table.to(device)]
            weights, table = self._count_weights()
            parts += [table] if table is not None else []
            self._probe.start()
        parts += [_as_integers(torch.ones((), device=device) if divisor is None else divisor.reshape(()).to(device))]
        clock.stop()
        self._open = _Open(step, rows, weights, parts, idle, clocks=[clock, *clocks])

    @torch.no_grad()
    def after(self, activations: ActivationTable | None, found_inf: Tensor | None = None) -> None:
        """End the sample that is open, after its update was launched, and send it to the host."""
        sample, self._open = self._open, None
        if sample is None:
            return
        device = sample.parts[0].device
        clock = DeviceClock(device)
        sums: Tensor | None = None
        if len(self._probe):
            sums, sample.since = self._probe.finish(sample.step, self._spreads)
            sums = sums.to(device)
            sample.probe = (self._probe.names, self._probe.dtypes, self._probe.masters)
        if self.shards is not None:
            sums = self._combine(sample, sums)
        if sums is not None:
            sample.parts.append(_as_integers(sums))
        self._spreads = {}
        flag = torch.full((), -1.0, device=device) if found_inf is None else found_inf.reshape(()).to(device)
        sample.parts.append(_as_integers(flag))
        if activations is not None:
            sample.activations = Header(activations.names, activations.numels, activations.dtypes)
            sample.parts.append(activations.table.to(device))
            sample.clocks.extend(activations.clocks)
        packed = torch.cat([part.reshape(-1) for part in sample.parts])
        sample.parts = []
        clock.stop()
        sample.clocks.append(clock)
        self._readback.push(packed, sample)

    @property
    def is_open(self) -> bool:
        """Whether a sample waits for the end of its step."""
        return self._open is not None

    def drop(self) -> None:
        """Forget the sample that is open: its step raised."""
        self._open = None
        self.disarm()

    @property
    def is_pending(self) -> bool:
        """Whether a sample is on its way to the host."""
        return len(self._readback) > 0

    def deliver(self, *, wait: bool) -> list[Sample]:
        """The samples that have arrived."""
        return [self._unpack(sample, values.numpy()) for sample, values in self._readback.deliver_tensors(wait=wait)]

    # --- packing ----------------------------------------------------------------------------------------------------

    def _count_weights(self) -> tuple[Header, Tensor | None]:
        params = {n: local(p) for n, p in self._values.items() if p.is_floating_point() or p.is_complex()}
        if not self._weights or not params:
            return Header(), None
        rows = self._of_whole(self._rows(tuple(params), [dense_values(p.detach()) for p in params.values()]))
        table = count_exponents(list(params.values()), None, self._tables[1]).table
        return rows, table.to(next(iter(self.params.values())).device)  # parts may be on the CPU

    def _combine(self, sample: _Open, sums: Tensor | None) -> Tensor | None:
        """Replace the tables of a sample by those of all ranks, and return the sums of all ranks."""
        assert self.shards is not None
        names = [header.names for header in (sample.gradients, sample.weights) if header.names]
        tables = list(zip(names, sample.parts[: len(names)], strict=True))
        combined, everything = self.shards.combine(tables, None if sums is None else (self._probe.names, sums))
        sample.parts[: len(names)] = combined
        return everything

    def _of_whole(self, rows: Header) -> Header:
        """The rows of whole tensors, of which this rank may store a part."""
        return rows if self.shards is None else replace(rows, numels=tuple(self.shards.numels[n] for n in rows.names))

    @staticmethod
    def _rows(names: tuple[str, ...], tensors: list[Tensor]) -> Header:
        return Header(names, tuple(t.numel() for t in tensors), tuple(format_name(t.dtype) for t in tensors))

    def _unpack(self, sample: _Open, values: Any) -> Sample:
        at = 0

        def take(count: int) -> Any:
            nonlocal at
            at += count
            return values[at - count : at]

        def table(header: Header) -> Any:
            return take(len(header.names) * NUM_COLUMNS)

        gradients, weights = table(sample.gradients), table(sample.weights)
        (divisor,) = take(1).view("float64").tolist()
        names, dtypes, masters = sample.probe
        sums = take(len(names) * NUM_UPDATE_COLUMNS).view("float64").reshape(-1, NUM_UPDATE_COLUMNS).tolist()
        (flag,) = take(1).view("float64").tolist()
        activations = table(sample.activations)
        self.seconds.append(sum(clock.seconds() for clock in sample.clocks))
        updates = {
            name: UpdateStats.from_row(name, dtype, master, row, sample.since)
            for name, dtype, master, row in zip(names, dtypes, masters, sums, strict=True)
        }
        skipped = None if flag < 0 else flag != 0
        return Sample(
            sample.step,
            skipped,
            divisor,
            sample.gradients.rows(gradients, divisor),
            sample.weights.rows(weights),
            sample.activations.rows(activations),
            updates,
            sample.idle,
        )


@torch.no_grad()
def num_nonfinite(gradients: Mapping[str, Tensor]) -> dict[str, int]:
    """The gradients that are not finite now, and how many elements of each; reads them."""
    counts = {}
    for name, grad in gradients.items():
        values = dense_values(local(grad))
        count = values.numel() - int(values.isfinite().sum())
        if count:
            counts[name] = count
    return counts


def _as_integers(values: Tensor) -> Tensor:
    return values.to(torch.float64).contiguous().view(torch.int64)
