"""Schedulers that are stepped with the result of a validation: ReduceLROnPlateau."""

from __future__ import annotations

import math

from halfstep.engine.engine import Engine
from halfstep.engine.schedules import needs_metric
from halfstep.events import log_warning

__all__ = ["step_on_metric"]


def step_on_metric(engine: Engine, value: float) -> None:
    """Step the schedulers that take a metric with `value`; NaN is no result, so it changes nothing."""
    if not any(needs_metric(scheduler) for scheduler in engine.schedulers):
        return
    if math.isnan(value):
        log_warning("The validation result is nan, so the scheduler that depends on it was not stepped.")
        return
    engine.step_scheduler(value)
