"""Losses of a run that need attention: those that are not finite, and spikes, with the batch they came from.

A spike is a loss far above the recent ones that comes down again within 16 steps, by three quarters of its rise. Far means all of:
ten standard deviations above the median, estimated from the median absolute deviation; half of the median; three times the
distance of any recent loss from the median; 2 % of the loss that the run started with. The third of these keeps losses with
heavy tails, mixtures of tasks and slow rises silent, because what the last 128 losses contain is not news; the fourth a loss
that has all but vanished.

Whether it comes down is what separates a spike from a new level: the next stage of a curriculum and a restart of the learning
rate raise the loss and keep it there, and are no fault. So an event is sent some losses after its step. The batch is
identified at once, while it still exists. A loss that stays up is reported only if it is also above twice the highest
of the first losses: that is worse than an untrained model.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from halfstep.watching.events import Event

__all__ = ["BatchIdentity", "Fingerprint", "LossRule"]


class BatchIdentity(Protocol):
    """Identifies a batch: as text for a reader, and as plain values for a file."""

    def as_data(self) -> Any:
        """Plain values."""


Fingerprint = Callable[[], "str | BatchIdentity"]


@dataclass
class _Rise:
    """A loss above the limit, and those that followed it."""

    step: int
    median: float
    num_recent: int
    text: str  # of the batch
    batch: Any
    losses: list[float] = field(default_factory=list)


class LossRule:
    """Losses that are not finite, and spikes."""

    window = 128  # recent losses
    min_losses = 50
    num_first = 20  # losses of the start
    deviations = 10.0  # above the median, in standard deviations estimated from the median absolute deviation
    rise = 0.5  # and at least this share of the median
    jump = 3.0  # times the largest distance of a recent loss from the median
    floor = 0.02  # of the loss at the start
    down = 0.75  # share of a rise that is gone when it is over
    patience = 16  # losses without that, after which they are a new level
    diverged = 2.0  # times the highest of the first losses

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.window)
        self._first: list[float] = []
        self._rise: _Rise | None = None
        self._in_nan = False
        self._most_samples = 0

    def observe(
        self, step: int, loss: float, fingerprint: Fingerprint | None = None, samples: int | None = None
    ) -> Iterator[Event]:
        """The events of one loss.

        `fingerprint` identifies the batch and is called only for a loss that may be reported. `samples` is the number of examples
        that the loss is the mean of: that of less than half of the largest batch is too noisy to be judged.
        """
        if not math.isfinite(loss):
            yield from self._end_rise(f"and was {loss} at step {step}")
            if not self._in_nan:
                self._in_nan = True
                text, batch = _identify(fingerprint)
                yield Event(
                    "nan-loss",
                    step,
                    f"the loss is {loss}{text}.",
                    {"loss": str(loss)} | batch,
                    "The forward pass overflowed, or the data or the weights are not finite; an autopsy of the step shows which.",
                )
            return
        self._in_nan = False
        self._most_samples = max(self._most_samples, samples or 0)
        if samples is not None and 2 * samples < self._most_samples:
            return
        if self._rise is not None:
            if loss > self._rise.median + (1 - self.down) * (max(self._rise.losses) - self._rise.median):
                yield from self._stay_up(loss)
                return
            steps = len(self._rise.losses)
            yield from self._end_rise(f"and came down after {steps} step{'s' if steps > 1 else ''}")
        if self._is_far(loss):
            text, batch = _identify(fingerprint)
            median = statistics.median(self._recent)
            self._rise = _Rise(step, median, len(self._recent), text, batch, [loss])
            return
        self._recent.append(loss)
        if len(self._first) < self.num_first:
            self._first.append(loss)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values, for a checkpoint."""
        return {
            "recent": list(self._recent),
            "first": list(self._first),
            "rise": None if self._rise is None else dataclasses.asdict(self._rise),
            "in_nan": self._in_nan,
            "most_samples": self._most_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the rule that this state is of."""
        self._recent = deque(state["recent"], maxlen=self.window)
        self._first = list(state["first"])
        self._rise = None if state["rise"] is None else _Rise(**state["rise"])
        self._in_nan, self._most_samples = state["in_nan"], state["most_samples"]

    def _is_far(self, loss: float) -> bool:
        """Whether a loss is far above the recent ones."""
        if len(self._recent) < self.min_losses or loss <= max(self._recent):  # the limit is above all of them
            return False
        median = statistics.median(self._recent)
        distances = [abs(x - median) for x in self._recent]
        return loss - median > max(
            self.deviations * 1.4826 * statistics.median(distances),
            self.rise * abs(median),
            self.jump * max(distances),
            self.floor * abs(statistics.median(self._first)),
        )

    def _stay_up(self, loss: float) -> Iterator[Event]:
        """Another loss that has not come down; too many are a new level, which later losses are compared with."""
        rise = self._rise
        assert rise is not None
        rise.losses.append(loss)
        if len(rise.losses) <= self.patience:
            return
        self._rise, self._recent = None, deque(rise.losses, maxlen=self.window)
        highest = max(self._first)
        if highest > 0 and min(rise.losses) > self.diverged * highest:
            yield _spike(
                rise,
                f"and stays above {self.diverged:g} times the highest of the first {len(self._first)} losses, {highest:.4g}",
                "The run diverges: look at this batch, lower the learning rate or max_norm, and resume from a checkpoint before this step.",
            )

    def _end_rise(self, ending: str) -> Iterator[Event]:
        """A rise is over: it was a spike, and its losses are recent ones from now on."""
        rise, self._rise = self._rise, None
        if rise is not None:
            self._recent.extend(rise.losses)
            yield _spike(
                rise,
                ending,
                "Look at this batch. If spikes recur on different batches, lower the learning rate or max_norm.",
            )


def _spike(rise: _Rise, ending: str, advice: str) -> Event:
    peak = max(rise.losses)
    return Event(
        "loss-spike",
        rise.step,
        f"the loss rose to {peak:.4g} {ending}; the median of the {rise.num_recent} before is {rise.median:.4g}{rise.text}.",
        {"loss": rise.losses[0], "peak": peak, "median": rise.median, "steps": len(rise.losses)} | rise.batch,
        advice,
    )


def _identify(fingerprint: Fingerprint | None) -> tuple[str, dict[str, Any]]:
    """A batch as the end of a sentence, and as data."""
    if fingerprint is None:
        return "", {}
    identity = fingerprint()
    return f" ({identity})", {"batch": identity if isinstance(identity, str) else identity.as_data()}
