"""Schedulers that are stepped with the result of a validation: ReduceLROnPlateau."""

from __future__ import annotations

import math

from halfstep.engine.engine import Engine
from halfstep.events import log_warning
from halfstep.jobs.job import takes_metric

__all__ = ["needs_metric", "step_on_metric"]


def needs_metric(engine: Engine) -> bool:
    """Whether one of the engine's schedulers is stepped with a validation result."""
    return any(takes_metric(scheduler) for scheduler in engine.schedulers)


def step_on_metric(engine: Engine, value: float) -> None:
    """Step the schedulers that take a metric with `value`; NaN is no result, so it changes nothing."""
    if not needs_metric(engine):
        return
    if math.isnan(value):
        log_warning("The validation result is nan, so the scheduler that depends on it was not stepped.")
        return
    by_engine = getattr(engine, "step_scheduler", None)
    if by_engine is not None:
        by_engine(value)
        return
    for scheduler in engine.schedulers:
        if takes_metric(scheduler):
            scheduler.step(value)
