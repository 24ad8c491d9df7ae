"""Which skipped steps get an autopsy."""

import logging
import math

import torch
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.scaling.scaler import NoScaler
from halfstep.watching.skips import Autopsies, is_due


def test_the_first_three_and_then_powers_of_two_are_examined():
    """A run that skips for ever spends little on autopsies."""
    assert [n for n in range(1, 70) if is_due(n)] == [1, 2, 3, 4, 8, 16, 32, 64]


def skip(steps, watch):
    """A run whose every step is skipped."""
    model = nn.Linear(2, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=watch, scaler=NoScaler(None))
    for _ in range(steps):

        def compute():
            return model(torch.full((1, 2), math.nan)).mean()

        with engine.forward():
            loss = compute()
        engine.backward(loss)
        engine.step(replay=compute)
    return engine


def test_autopsies_go_to_the_outlet_and_the_log(caplog):
    """Each once, as a value and as text."""
    received = []
    with caplog.at_level(logging.WARNING, logger="halfstep"):
        skip(6, Autopsies(received.append))
    assert [a.step for a in received] == [1, 2, 3, 4]
    assert sum("was skipped (data)" in record.message for record in caplog.records) == 4


def test_nothing_of_a_step_is_kept_after_its_outcome():
    """Batches are freed once the step was examined, or was not due."""
    engine = skip(6, Autopsies())
    assert [engine.replays.take(step) for step in range(1, 7)] == [[]] * 6


def test_a_run_without_a_watch_records_nothing():
    """No state of generators is copied, and no function is kept."""
    engine = skip(2, None)
    assert not engine.replays.active
    assert engine.replays.take(2) == []
