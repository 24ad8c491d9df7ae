"""What a training run records and reports of its Watch: samples and events in the run file, a few lines at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from halfstep.checkpoint.runlog import RunLog
from halfstep.precision.formats import Format, get_format
from halfstep.precision.policy import Policy
from halfstep.train.config import TrainConfig
from halfstep.watching.events import Event
from halfstep.watching.sample import Sample
from halfstep.watching.watch import Watch

__all__ = ["record_event", "record_sample", "summary_of", "watch_of"]

_WORTH_REPORTING = 0.01  # share of a gradient that is lost to underflow


def watch_of(config: TrainConfig, outlet: Callable[[Event], None]) -> Watch | None:
    """The Watch that the settings of a run ask for."""
    if config.watch is None:
        return None
    return Watch(every=config.watch, activations=config.watch_activations, outlet=outlet)


def record_event(log: RunLog, event: Event) -> None:
    """Write an event of a Watch to the run file, under its own name."""
    values = event.as_dict()
    log.event(values.pop("kind"), **values)


def record_sample(log: RunLog, sample: Sample) -> None:
    """Write a sample to the run file."""
    groups = {"gradients": sample.gradients, "weights": sample.weights, "activations": sample.activations}
    records: dict[str, Any] = {
        group: {name: stats.to_record() for name, stats in values.items()} for group, values in groups.items() if values
    }
    updates = {name: {"ratio": update.ratio, "lost": update.lost} for name, update in sample.updates.items()}
    log.event("numerics", step=sample.step, skipped=sample.skipped, scale=sample.scale, updates=updates, **records)


def summary_of(watch: Watch, policy: Policy) -> tuple[str, ...]:
    """What the samples and events of a run amount to, a line each."""
    if not watch.samples:
        return ()
    lines = [f"watched     {watch.cost}"]
    fmt = get_format(policy.compute)
    if isinstance(fmt, Format):
        flushed = {name: stats.flushed(fmt) for name, stats in watch.samples[-1].gradients.items()}
        worst = max(flushed, key=flushed.__getitem__, default="")
        if flushed.get(worst, 0.0) >= _WORTH_REPORTING:
            lines.append(
                f"underflow   {100 * flushed[worst]:.1f} % of the unscaled gradient of {worst} is below {fmt.name}'s range"
            )
    if watch.events:
        counts = Counter(event.kind for event in watch.events)
        lines.append(f"events      {', '.join(f'{kind} {count}' for kind, count in counts.items())}")
    return tuple(lines)
