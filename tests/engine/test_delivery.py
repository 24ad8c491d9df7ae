"""Outcomes of steps: delivered once, in order, to schedulers and callbacks."""

import pytest
import torch
from torch import nn

from halfstep.engine.delivery import Delivery, Progress
from halfstep.engine.result import StepResult
from halfstep.engine.schedules import Schedules
from halfstep.engine.steps import Decision
from halfstep.errors import OverflowStop, SettingError
from halfstep.scaling.scaler import LossScaler


class Counting:
    """A scheduler that counts its steps."""

    def __init__(self):
        self.steps = 0

    def step(self):
        self.steps += 1


def decision(found_inf):
    """What a step decided."""
    return Decision(torch.tensor(found_inf), torch.tensor(2.0), torch.tensor(1.0))


def deliver(flags, scaler=None):
    """Push outcomes with these flags and drain them."""
    progress, scheduler, results = Progress(), Counting(), []
    scaler = scaler or LossScaler(max_skips=None)
    delivery = Delivery(progress, Schedules([scheduler]), scaler, {}, [results.append])
    for number, flag in enumerate(flags, start=1):
        scaler.advance(torch.tensor(flag))
        delivery.push(decision(flag), torch.tensor(4.0), StepResult(number, boundary=True, lr=0.1))
    delivery.drain()
    return progress, scheduler, results


def test_only_applied_steps_advance_the_schedulers():
    """A skipped step is delivered, and neither counted nor scheduled."""
    progress, scheduler, results = deliver([0.0, 1.0, 0.0])
    assert (progress.applied, scheduler.steps) == (2, 2)
    assert [(r.step, r.skipped, r.grad_norm, r.scale) for r in results] == [
        (1, False, 2.0, 4.0),
        (2, True, 2.0, 4.0),
        (3, False, 2.0, 4.0),
    ]


def test_too_many_skips_in_a_row_stop_the_run():
    """The hard stop is raised when the outcome is known on the host."""
    with pytest.raises(OverflowStop):
        deliver([1.0] * 3, LossScaler(max_skips=3))


def test_discarded_outcomes_are_never_delivered():
    """A state that is loaded replaces the run they belong to."""
    results = []
    delivery = Delivery(Progress(), Schedules([]), LossScaler(), {}, [results.append])
    delivery.push(decision(0.0), torch.tensor(1.0), StepResult(1, boundary=True, lr=0.1))
    delivery.discard()
    delivery.drain()
    assert results == []


def test_a_schedule_that_has_ended_is_an_error_with_the_way_out():
    """OneCycleLR raises after its last step; the message names the number of updates."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)
    optimizer.step()
    Schedules([scheduler]).advance(1)
    with pytest.raises(SettingError, match=r"after update 2.*number of updates in the run"):
        Schedules([scheduler]).advance(2)
        Schedules([scheduler]).advance(2)
