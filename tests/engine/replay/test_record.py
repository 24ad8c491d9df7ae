"""What is recorded for a replay."""

import random

import numpy as np
import torch
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.engine.replay.record import Generators


class Asking:
    """A watch that asks for records."""

    replay = True

    def attach(self, engine):
        """The protocol needs one method."""


def build(**options):
    model = nn.Linear(2, 1)
    return model, Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=Asking(), **options)


def micro_batch(model, engine, replay=None, weight=None, **options):
    with engine.forward():
        loss = model(torch.ones(1, 2)).mean()
    engine.backward(loss, weight)
    engine.step(replay=replay, **options)


def test_generators_are_restored_exactly():
    """Python, NumPy and torch draw the same numbers again."""
    state = Generators.now(torch.device("cpu"))
    draw = lambda: (random.random(), np.random.rand(), torch.rand(2).tolist())  # noqa: E731, NPY002
    first = draw()
    state.restore()
    assert draw() == first


def test_each_micro_batch_of_a_window_is_recorded_with_its_factor():
    """Two of them, with weights 1 and 4."""
    model, engine = build(accumulate=2)
    micro_batch(model, engine, lambda: 1, weight=1)
    micro_batch(model, engine, lambda: 2, weight=4)
    first, second = engine.replays.take(1)
    assert (first.compute_loss(), second.compute_loss()) == (1, 2)
    assert second.factor > 0
    assert engine.replays.take(1) == []


def test_a_step_that_ends_no_micro_batch_records_none():
    """step(last=True) after the data ran out."""
    model, engine = build(accumulate=3)
    micro_batch(model, engine, lambda: 1)
    engine.step(last=True)
    assert len(engine.replays.take(1)) == 1


def test_a_dropped_window_is_forgotten():
    """reset_window() starts from scratch."""
    model, engine = build(accumulate=2)
    micro_batch(model, engine, lambda: 1)
    engine.reset_window()
    micro_batch(model, engine, lambda: 2)
    micro_batch(model, engine, lambda: 3)
    assert [batch.compute_loss() for batch in engine.replays.take(1)] == [2, 3]


def test_a_forward_outside_the_block_leaves_no_record_of_its_random_numbers():
    """The place in the window is there, and empty."""
    model, engine = build()
    engine.backward(model(torch.ones(1, 2)).mean())
    engine.step(replay=lambda: 1)
    assert engine.replays.take(1) == [None]


def test_few_steps_are_kept_if_nobody_asks_for_them():
    """Closures with batches must not pile up."""
    model, engine = build()
    for _ in range(10):
        micro_batch(model, engine, lambda: 1)
    assert sum(bool(engine.replays.take(step)) for step in range(1, 11)) <= 4


def test_a_function_without_a_watch_is_reported_once(caplog):
    """It has no effect."""
    model = nn.Linear(2, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    micro_batch(model, engine, lambda: 1)
    micro_batch(model, engine, lambda: 1)
    assert sum("step(replay=...) has no effect" in record.message for record in caplog.records) == 1
