"""One sequence of steps that a Watch looks at: when it is sampled, and the rules that judge its samples."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from halfstep.watching.activations import Activations
from halfstep.watching.cost import StepClock
from halfstep.watching.events import DriftRule, Event, LostUpdateRule, OutcomeRule
from halfstep.watching.sample import Sample
from halfstep.watching.sampler import Sampler, is_due

__all__ = ["Stream"]


class Stream:
    """One sequence of steps that a Watch looks at, and the rules that judge its samples."""

    def __init__(
        self,
        sampler: Sampler,
        activations: Activations | None,
        every: int,
        finish: Callable[[Sample], None],
        send: Callable[[Event], None],
    ) -> None:
        self.sampler, self._activations, self._every = sampler, activations, every
        self._finish, self._send = finish, send
        self.outcomes, self._lost, self._drift = OutcomeRule(), LostUpdateRule(), DriftRule()
        self._num_steps = 0  # since the Watch was attached: a resumed run is sampled early, too
        self._is_due = is_due(1, every)  # whether the next step is sampled
        self._waiting: deque[Sample] = deque()
        self._skipped: dict[int, bool] = {}
        self._sampled: set[int] = set()
        self._reported_missing = False
        self.clock = StepClock(self.device)
        self.is_pending = False  # whether `collect` has anything to do
        self.has_outcomes = False  # whether `outcome` is called for every step
        self.released = False  # whether weights are updated inside backward

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.sampler.params.values())).device

    def arm(self) -> None:
        """Prepare for the next forward, if its step is sampled."""
        if self._is_due:
            if self._activations is not None:
                self._activations.arm()
            if self.released:
                self.sampler.arm()

    def before(
        self,
        step: int,
        gradients: Callable[[], Mapping[str, Tensor]],
        divisor: Tensor | None,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        """Before an update: begin a sample where one is due; in other steps nobody asks for the gradients."""
        self._num_steps += 1
        sampled, self._is_due = self._is_due, is_due(self._num_steps + 1, self._every)
        if sampled:
            self._sampled.add(step)
            self.sampler.before(step, gradients(), divisor, self._idle(optimizers))

    def after(self, found_inf: Tensor | None = None) -> None:
        """After an update was launched: end the sample, and prepare for the next step."""
        if self.sampler.is_open:
            table = None
            if self._activations is not None:
                table = self._activations.take()
                self._report_missing()
            self.sampler.after(table, found_inf)
            self.is_pending = True
        self.clock.mark()
        if self._is_due:
            self.arm()

    def outcome(
        self,
        step: int,
        *,
        skipped: bool,
        scale: float | None,
        nonfinite: Mapping[str, int | None],
        ranks: Sequence[int] = (),
    ) -> None:
        """The outcome of a step has arrived."""
        if self.has_outcomes and step in self._sampled:
            self._skipped[step] = skipped
        for event in self.outcomes.observe(step, skipped=skipped, scale=scale, nonfinite=nonfinite, ranks=ranks):
            self._send(event)

    def collect(self, *, wait: bool) -> None:
        """Judge the samples that have arrived and whose outcome is known."""
        self._waiting.extend(self.sampler.deliver(wait=wait))
        while self._waiting and (wait or not self.has_outcomes or self._waiting[0].step in self._skipped):
            sample = self._waiting.popleft()
            self._sampled.discard(sample.step)
            skipped = self._skipped.pop(sample.step, sample.skipped)
            sample = dataclasses.replace(sample, skipped=skipped)
            self._finish(sample)
            for rule in (self._lost, self._drift):
                for event in rule.observe(sample):
                    self._send(event)
        self.is_pending = bool(self._waiting) or self.sampler.is_pending

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside this block forwards are not counted: a step may be computed again."""
        if self._activations is None:
            yield
            return
        self._activations.is_paused = True
        try:
            yield
        finally:
            self._activations.is_paused = False

    def close(self) -> None:
        """Remove the hooks."""
        self.sampler.disarm()
        if self._activations is not None:
            self._activations.disarm()

    def _idle(self, optimizers: Iterable[torch.optim.Optimizer]) -> frozenset[str]:
        """The parameters whose learning rate is 0."""
        idle = {
            id(p)
            for optimizer in optimizers
            for group in optimizer.param_groups
            if not isinstance(group.get("lr"), Tensor) and group.get("lr") == 0
            for p in group["params"]
        }
        return frozenset(name for name, p in self.sampler.params.items() if id(p) in idle) if idle else frozenset()

    def _report_missing(self) -> None:
        assert self._activations is not None
        reason = self._activations.missing()
        if reason is not None and not self._reported_missing:
            self._reported_missing = True
            advice = "Gradients, weights and updates are watched all the same."
            self._send(Event("no-activations", self._num_steps, f"activations are not watched: {reason}", {}, advice))
