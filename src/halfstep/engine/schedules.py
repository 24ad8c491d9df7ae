"""Schedulers: how each one is stepped, and schedulers that the loop steps as well.

    torch's schedulers                once per applied update, by step()
    timm's, counting updates          once per applied update, by step_update(number of applied updates)
    ReduceLROnPlateau and its like    by Engine.step_scheduler(metric), which the loop calls after validation

A `scheduler.step()` left in the loop advances a schedule twice per update. torch's schedulers count their steps, so the
count after the Engine's own step is compared with the count at the next one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import SettingError

__all__ = ["Schedules", "check_schedulers", "needs_metric", "required_arguments"]

_METRIC_NAMES = {"metric", "metrics", "val_loss", "score"}


class Schedules:
    """The schedulers of a run."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._with_metric = {id(s) for s in schedulers if needs_metric(s)}
        self._counting_updates = {id(s) for s in schedulers if _counts_updates(s)}
        self._schedulers = schedulers  # the Engine's own list: what is removed from it is not stepped any more
        self._counts: list[tuple[Any, ...]] | None = None  # as the Engine left them; None: anything is accepted
        self._foreign: str | None = None  # what else stepped a scheduler

    @property
    def _by_update(self) -> list[Any]:
        return [s for s in self._schedulers if id(s) not in self._with_metric]

    @property
    def _by_metric(self) -> list[Any]:
        return [s for s in self._schedulers if id(s) in self._with_metric]

    def advance(self, applied: int) -> None:
        """Advance every scheduler for the update that was just applied, the `applied`-th of the run."""
        self._compare()
        for scheduler in self._by_update:
            try:
                if id(scheduler) in self._counting_updates:
                    scheduler.step_update(num_updates=applied)
                else:
                    scheduler.step()
            except ValueError as error:  # OneCycleLR at its end
                raise SettingError(
                    f"{type(scheduler).__name__} could not be stepped after update {applied}: {error}. The Engine steps schedulers once per "
                    "update: build it for the number of updates in the run, which is epochs x batches / accumulate."
                ) from error
        self._record()

    def step_with(self, metric: Any) -> None:
        """Step the schedulers that need a metric, and only those."""
        if not self._by_metric:
            raise SettingError(
                "step_scheduler(metric) has nothing to step: no scheduler of this Engine needs a metric. Schedulers such as CosineAnnealingLR "
                "are stepped by engine.step(); pass ReduceLROnPlateau as Engine(scheduler=...)."
            )
        single = isinstance(metric, Tensor) and metric.numel() == 1
        if isinstance(metric, bool) or not (single or isinstance(metric, int | float)):
            raise SettingError(f"step_scheduler() takes one number, such as the validation loss, not {metric!r}.")
        value = float(metric)
        if math.isnan(value):
            raise SettingError(
                "step_scheduler(nan): the metric is not a number; check the validation that computed it."
            )
        for scheduler in self._by_metric:
            scheduler.step(value)

    def check(self) -> None:
        """Raise if something else stepped a scheduler since the Engine did."""
        self._compare()
        if self._foreign is not None:
            message, self._foreign = self._foreign, None
            self._record()
            raise SettingError(message)
        if self._counts is None:
            self._record()

    def forget(self) -> None:
        """Accept the schedulers as they are: a state was loaded."""
        self._counts, self._foreign = None, None

    def _record(self) -> None:
        self._counts = [_count(s) for s in self._by_update]

    def _compare(self) -> None:
        """Note a change; it is raised by the next step, not by whoever happens to wait for an outcome."""
        for scheduler, before in zip(self._by_update, self._counts or [], strict=False):
            if _has_advanced(before, _count(scheduler)):
                name = type(scheduler).__name__
                self._foreign = (
                    f"{name}.step() was called in addition to engine.step(), which steps it once per update: its learning rate would "
                    "decay twice. Remove scheduler.step() from the loop, or build the Engine without scheduler= and step it yourself."
                )


def check_schedulers(schedulers: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Raise for schedulers that the Engine cannot step, or would step twice."""
    nested = [id(inner) for s in schedulers for inner in _family(s)]
    for scheduler in schedulers:
        name = type(scheduler).__name__
        if not callable(getattr(scheduler, "step", None)):
            raise SettingError(f"scheduler={scheduler!r} has no step(); pass a torch.optim.lr_scheduler.")
        if not any(getattr(scheduler, "optimizer", o) is o for o in optimizers):
            raise SettingError(
                "The scheduler was built on another optimizer than the Engine's, so it would change nothing."
            )
        if nested.count(id(scheduler)) > 1:
            raise SettingError(
                f"{name} is in scheduler= twice, or also inside a SequentialLR or ChainedScheduler of it; it would be stepped twice per "
                "update. Pass the outer scheduler only."
            )
        if getattr(scheduler, "t_in_epochs", False) and callable(getattr(scheduler, "step_update", None)):
            raise SettingError(
                f"{name} counts epochs (t_in_epochs=True), and the Engine knows updates only. Build it with t_in_epochs=False and its "
                "lengths in updates, or leave it out of scheduler= and call scheduler.step(epoch) after each epoch."
            )
        required = required_arguments(scheduler.step)
        if required and not needs_metric(scheduler) and not _counts_updates(scheduler):
            raise SettingError(
                f"{name}.step() needs {', '.join(required)}, which the Engine does not know. Leave it out of scheduler= and call "
                "scheduler.step(...) yourself, or wrap it in a class whose step() needs no argument."
            )


def needs_metric(scheduler: Any) -> bool:
    """Whether a scheduler is stepped with the result of a validation, as ReduceLROnPlateau is."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return True
    required = required_arguments(scheduler.step)
    return len(required) == 1 and required[0] in _METRIC_NAMES


def _counts_updates(scheduler: Any) -> bool:
    """Whether a scheduler has timm's two methods, step(epoch) and step_update(num_updates)."""
    return bool(required_arguments(scheduler.step)) and callable(getattr(scheduler, "step_update", None))


def required_arguments(function: Any) -> list[str]:
    """The arguments that a function cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return []
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return [p.name for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]


def _family(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those inside it."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", None) or ():
        yield from _family(inner)


def _has_advanced(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether any count grew; a smaller one was loaded by whoever returned to an earlier state."""
    pairs = [pair for old, new in zip(before, now, strict=False) for pair in zip(old, new, strict=True)]
    return len(before) == len(now) and any(
        isinstance(old, int | float) and isinstance(new, int | float) and new > old for old, new in pairs
    )


def _count(scheduler: Any) -> tuple[Any, ...]:
    """How far a scheduler and those inside it are, as they count themselves."""
    return tuple((getattr(s, "last_epoch", None), getattr(s, "_step_count", None)) for s in _family(scheduler))
