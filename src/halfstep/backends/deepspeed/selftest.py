"""The gradient that reached the optimizer, compared with the true one, in the first window that is not skipped.

DeepSpeed has shipped releases whose optimizers were given gradients that were wrong by a factor, without an error: divided by a
loss scale that was never applied, halved on the step on which the scale grew, clipped while still scaled. A factor is
invisible in the loss of the first steps, and Adam hides it for longer. So a few parameters have hooks that add up their own
gradients in fp32. When the optimizer is about to be stepped, the mean of these over all ranks is compared with what is in
its hands:

    ratio    = <actual, true> / <true, true>      1 where all is well
    distance = |actual - true| / |true|           0 but for the rounding of the reduction

and a distance above the limit stops the run before the first update, with the ratio in the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.backends.deepspeed.known import engine_faults
from halfstep.backends.deepspeed.library import version
from halfstep.backends.deepspeed.partition import Partition, numel_of, shape_of
from halfstep.errors import HalfstepError
from halfstep.hardware.units import few

__all__ = ["LIMIT", "FirstStep", "GradientSums", "Reached", "compare", "sample"]

LIMIT = (
    0.03  # of the distance; a reduction in bf16 over 1000 ranks stays below it, and the least factor of a fault is 2
)
_NUM_SAMPLED = 4
_MOST_ELEMENTS = 1 << 22  # of a sampled parameter, whose whole fp32 gradient is stored for one window


@dataclass(frozen=True)
class Reached:
    """How the gradient that reached the optimizer compares with the true one."""

    ratio: float
    distance: float
    num_elements: int

    @property
    def is_right(self) -> bool:
        """Whether they agree but for rounding."""
        return self.distance <= LIMIT

    def joined(self, other: Reached) -> Reached:
        """Of two parts of a model, the one that is farther off, with the elements of both."""
        worse = max(self, other, key=lambda part: part.distance)
        return Reached(worse.ratio, worse.distance, self.num_elements + other.num_elements)

    def __str__(self) -> str:
        return f"{self.ratio:.6g} times the true gradient (relative distance {self.distance:.3g}, {self.num_elements:,} elements)"


def sample(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A few parameters of a model, from its first to its last; small ones where there are any."""
    small = [name for name, p in params.items() if numel_of(p) <= _MOST_ELEMENTS]
    names = small or sorted(params, key=lambda name: numel_of(params[name]))[:1]
    last = len(names) - 1
    places = sorted({round(i * last / (_NUM_SAMPLED - 1)) for i in range(_NUM_SAMPLED)})
    return {names[place]: params[names[place]] for place in places}


class GradientSums:
    """The sums of this rank's own gradients of a few parameters, divided by `factor`, until `close`."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.factor: float | Tensor = 1.0  # of the losses, where somebody multiplies them
        self.sums: dict[str, Tensor] = {}
        self._params = dict(params)
        self._hooks = [param.register_hook(self._adding(name)) for name, param in params.items()]  # type: ignore[no-untyped-call]

    def _adding(self, name: str) -> Callable[[Tensor], None]:
        def add(grad: Tensor) -> None:
            part = grad.detach().float() / self.factor
            self.sums[name] = self.sums[name] + part if name in self.sums else part.clone()

        return add

    def means(self) -> dict[str, Tensor]:
        """The means over ranks, flattened; zeros for a parameter that no loss has used. All ranks call it."""
        means = {}
        for name, param in self._params.items():
            local = self.sums.get(name)
            if local is None:
                local = torch.zeros(shape_of(param), device=param.device)
            means[name] = local.reshape(-1).clone()
            dist.all_reduce(means[name])
            means[name] /= dist.get_world_size()
        return means

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.sums = [], {}


def compare(pairs: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Reached | None:
    """Compare actual with true gradients over all ranks, which call it together; None if the true ones are 0 or not finite."""
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for actual, true in pairs:
        a, t = actual.detach().to(device).double(), true.to(device).double()
        sums += torch.stack(
            ((a * t).sum(), (t * t).sum(), (a - t).square().sum(), torch.full_like(a[:1].sum(), a.numel()))
        )
    dist.all_reduce(sums)
    product, square, difference, num_elements = sums.tolist()
    if not 0 < square < float("inf"):
        return None
    return Reached(product / square, (difference / square) ** 0.5, int(num_elements))


class FirstStep:
    """The test of one run: `begin` before the step, `verify` when its optimizer is about to be called."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._gradients: GradientSums | None = GradientSums(sample(partition.params))
        self._true: dict[str, Tensor] = {}
        self.outcome: Reached | None = None

    def pending(self) -> list[Tensor]:
        """The sums so far, which follow when the gradients of an open window are multiplied."""
        return [] if self._gradients is None else list(self._gradients.sums.values())

    def begin(self, divisor: Tensor) -> None:
        """Compute the true gradients of a window that is about to be applied."""
        if self._gradients is not None:
            self._true = {name: mean / divisor.to(mean.device) for name, mean in self._gradients.means().items()}

    def verify(self) -> None:
        """Compare the gradients that the optimizer has now; raises if they are wrong."""
        if not self._true:
            return
        part = self._partition
        pairs = []
        for name, true in self._true.items():
            fragment = part.fragments.get(name)
            grad = None if fragment is None else part.flats[fragment.flat].grad
            if fragment is not None and grad is not None:
                pairs.append((fragment.of(grad), true[fragment.start : fragment.start + fragment.numel]))
        reached = compare(pairs, part.device)
        if reached is None:
            return
        self.outcome = reached if self.outcome is None else self.outcome.joined(reached)
        if not reached.is_right:
            raise HalfstepError(wrong_gradient(reached, part.engine))

    def end(self) -> None:
        """The window is over; the hooks are removed once a comparison was made."""
        self._true = {}
        if self._gradients is None:
            return
        self._gradients.sums.clear()
        if self.outcome is not None:
            self.close()

    def close(self) -> None:
        """Remove the hooks."""
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None


def wrong_gradient(reached: Reached, engine: Any) -> str:
    """The message for a gradient that is wrong, with the faults that this release is known to have here."""
    known = [f"{fault.id} ({fault.when})" for fault in engine_faults(engine)]
    cited = f"Known faults of this configuration: {few(known)}" if known else "No known fault explains it"
    return (
        f"The first update was stopped: {type(engine.optimizer).__name__} of DeepSpeed {version()} gave the optimizer {reached}. {cited}. "
        'Use another version of DeepSpeed (docs/deepspeed.md lists the faults by release), another ZeRO stage, or backend="fsdp".'
    )
