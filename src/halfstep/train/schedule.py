"""Schedulers that are stepped with the result of a validation (ReduceLROnPlateau), and jobs that have none."""

from __future__ import annotations

import math

from halfstep.engine.engine import Engine
from halfstep.engine.schedules import needs_metric
from halfstep.errors import SettingError
from halfstep.events import log_warning
from halfstep.jobs.job import Job

__all__ = ["check_validation", "reject_metric_schedulers", "step_on_metric"]


def step_on_metric(engine: Engine, value: float) -> None:
    """Step the schedulers that take a metric with `value`; NaN is no result, so it changes nothing."""
    if not any(needs_metric(scheduler) for scheduler in engine.schedulers):
        return
    if math.isnan(value):
        log_warning("The validation result is nan, so the scheduler that depends on it was not stepped.")
        return
    engine.step_scheduler(value)


def check_validation(job: Job, engine: Engine) -> None:
    """What a job without a validation split cannot use."""
    if job.has_validation:
        return
    reason = f"{job.describe('data')} has no `split` argument"
    reject_metric_schedulers(engine, reason)
    if job.metric is not None:
        log_warning(f"{reason}, so nothing is validated and the job's metric has no effect.")


def reject_metric_schedulers(engine: Engine, reason: str) -> None:
    """Raise if a scheduler needs the result of a validation."""
    if any(needs_metric(scheduler) for scheduler in engine.schedulers):
        raise SettingError(
            f"ReduceLROnPlateau is stepped with the result of a validation, and there is none: {reason}. Return validation data "
            "for split='val', or use another scheduler."
        )
