"""Schedulers that are stepped with the result of a validation: ReduceLROnPlateau."""

from __future__ import annotations

from halfstep.engine.engine import Engine
from halfstep.jobs.job import takes_metric

__all__ = ["needs_metric", "step_on_metric"]


def needs_metric(engine: Engine) -> bool:
    """Whether one of the engine's schedulers is stepped with a validation result."""
    return any(takes_metric(scheduler) for scheduler in engine.schedulers)


def step_on_metric(engine: Engine, value: float) -> None:
    """Step the schedulers that take a metric with `value`."""
    for scheduler in engine.schedulers:
        if takes_metric(scheduler):
            scheduler.step(value)
