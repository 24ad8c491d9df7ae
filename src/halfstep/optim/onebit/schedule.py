"""When the compressed optimizers send what: the state of their schedules, as values that a checkpoint stores.

A schedule counts applied steps: a step that an overflow skipped does not advance it. It lives on the host, because it decides which
collectives run, and every rank must come to the same decision.

    FreezeSchedule    1-bit Adam and 1-bit LAMB: dense steps up to `freeze_step`, compressed ones after it
    ZeroOneSchedule   0/1 Adam: variance steps at growing distance, then local steps between growing synchronizations
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

__all__ = ["FreezePolicy", "FreezeSchedule", "Stability", "ZeroOnePolicy", "ZeroOneSchedule", "schedule_from"]


@dataclass(frozen=True)
class Stability:
    """When a variance is stable enough to be frozen: `freeze_step="auto"`.

    The 1-bit Adam paper stops its warm-up when |v_t|_1 / |v_(t-D)|_1 passes a threshold. A growing variance passes it as well, so here
    the smaller of the ratio and its inverse must pass. D is 1 / (1 - beta2), the number of steps that an average with beta2
    remembers. The norms are divided by 1 - beta2^t, without which every young average grows, and both must be at least D steps old.
    """

    threshold: float = 0.96
    distance: int = 1000

    @property
    def interval(self) -> int:
        """Steps from one sample of the norm to the next."""
        return max(1, self.distance // 10)

    def is_stable(self, samples: tuple[tuple[int, float], ...]) -> bool:
        """Whether the newest of (step, norm) samples is close to one that is `distance` older."""
        newest, norm = samples[-1]
        old = [value for step, value in samples if step <= newest - self.distance and step >= self.distance]
        if not old or not (norm > 0 and old[-1] > 0):
            return False
        return min(norm / old[-1], old[-1] / norm) >= self.threshold


@dataclass(frozen=True)
class FreezePolicy:
    """The settings of a `FreezeSchedule`: a number of steps, or a test of the variance."""

    freeze_step: int | None
    stability: Stability


@dataclass(frozen=True)
class FreezeSchedule:
    """How far 1-bit Adam or 1-bit LAMB is."""

    step: int = 0  # applied steps
    frozen_at: int = -1  # the step after which the variance was frozen; -1: not yet
    samples: tuple[tuple[int, float], ...] = ()  # (step, norm of the variance), oldest first, for `Stability`

    @property
    def frozen(self) -> bool:
        """Whether the next step is compressed."""
        return self.frozen_at >= 0

    @property
    def dense(self) -> bool:
        """Whether the next step needs the dense mean of the gradients."""
        return not self.frozen

    def wants_norm(self, policy: FreezePolicy) -> bool:
        """Whether the norm of the variance after the next step is needed."""
        return not self.frozen and policy.freeze_step is None and (self.step + 1) % policy.stability.interval == 0

    def advance(self, policy: FreezePolicy, norm: float | None = None) -> FreezeSchedule:
        """The schedule after one more applied step; `norm` is that of the variance, where it is wanted."""
        after = replace(self, step=self.step + 1)
        if self.frozen:
            return after
        if policy.freeze_step is not None:
            return replace(after, frozen_at=after.step) if after.step >= policy.freeze_step else after
        if norm is None:
            return after
        oldest = after.step - policy.stability.distance - policy.stability.interval
        samples = (*(sample for sample in self.samples if sample[0] > oldest), (after.step, norm))
        if policy.stability.is_stable(samples):
            return replace(after, frozen_at=after.step, samples=())
        return replace(after, samples=samples)


@dataclass(frozen=True)
class ZeroOnePolicy:
    """The settings of a `ZeroOneSchedule`, under DeepSpeed's names."""

    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int


@dataclass(frozen=True)
class ZeroOneSchedule:
    """How far 0/1 Adam is."""

    step: int = 0  # applied steps
    frozen_at: int = -1
    var_interval: int = 1  # a step is a variance step if its number is a multiple of this
    var_counter: int = 0  # variance steps at this interval
    var_updates: int = 0  # variance steps so far
    local_interval: int = 1  # after the freeze: ranks synchronize at steps whose number is a multiple of this
    local_counter: int = 0  # steps at this interval
    local_steps: int = 0  # since the last synchronization

    @property
    def frozen(self) -> bool:
        """Whether the variance stays what it is, and steps are local."""
        return self.frozen_at >= 0

    @property
    def dense(self) -> bool:
        """Whether the next step updates the variance, from the dense mean of the gradients."""
        return not self.frozen and (self.step + 1) % self.var_interval == 0

    @property
    def synchronizes(self) -> bool:
        """Whether ranks exchange what they accumulated locally at the end of the next step."""
        return self.frozen and (self.step + 1) % self.local_interval == 0

    def advance(self, policy: ZeroOnePolicy) -> ZeroOneSchedule:
        """The schedule after one more applied step."""
        step = self.step + 1
        after = replace(self, step=step)
        if self.dense:
            full = self.var_counter + 1 == policy.var_update_scaler
            after = replace(
                after,
                var_updates=self.var_updates + 1,
                var_counter=0 if full else self.var_counter + 1,
                var_interval=self.var_interval * (2 if full else 1),
            )
        elif self.frozen:
            full = self.local_counter + 1 == policy.local_step_scaler
            interval = min(policy.local_step_clipper, 2 * self.local_interval) if full else self.local_interval
            after = replace(
                after,
                local_steps=0 if self.synchronizes else self.local_steps + 1,
                local_counter=0 if full else self.local_counter + 1,
                local_interval=interval,
            )
        return replace(after, frozen_at=step) if not self.frozen and step > policy.var_freeze_step else after


_Schedule = TypeVar("_Schedule", FreezeSchedule, ZeroOneSchedule)


def schedule_from(kind: type[_Schedule], saved: dict[str, Any]) -> _Schedule:
    """A schedule from the plain values of `dataclasses.asdict`, as a JSON file returns them."""
    known = {field.name for field in fields(kind)}
    values = {name: value for name, value in saved.items() if name in known}
    if "samples" in values:
        values["samples"] = tuple((int(step), float(norm)) for step, norm in values["samples"])
    return kind(**values)
