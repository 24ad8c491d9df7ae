"""Buffers that a loop edits: what a replay computes with is what the step computed with."""

import math

import pytest
import torch
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.watching.replay import examine
from halfstep.watching.skips import Autopsies


class Tempered(nn.Module):
    """Batch norm, a temperature that the loop sets, and a counter that the forward advances."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        x = self.norm(self.inner(x)) * self.temperature
        return x / (self.calls != 7)  # a division by 0 in the 7th call


def filled(model, value):
    model.temperature.fill_(value)


def replaced(model, value):
    model.temperature = torch.tensor([value])  # of another shape


def as_data(model, value):
    model.temperature.data.fill_(value)


def train(edit, value, watch, micro=1, steps=3, between=lambda engine: None):
    """Windows of three micro-batches; in the second window the loop edits before one of them, and repairs afterwards."""
    torch.manual_seed(0)
    model = Tempered()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", accumulate=3, watch=watch)
    for step in range(steps):
        for number in range(3):
            x = torch.randn(5, 4)
            if step == 1 and number == micro:
                edit(model, value)

            def compute(x=x):
                return model(x).square().mean()

            with engine.forward():
                loss = compute()
            engine.backward(loss)
            between(engine)
            engine.step(replay=compute)
        if step == 1:
            model.temperature = torch.ones(())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()} | {"rng": torch.get_rng_state()}
    engine.close()
    return state


@pytest.mark.parametrize("micro", [0, 1, 2])
@pytest.mark.parametrize("edit", [filled, replaced])
@pytest.mark.parametrize(("value", "cause"), [(math.nan, "weights"), (3e38, "forward")])
def test_an_edit_between_micro_batches_is_in_the_replay(edit, value, cause, micro):
    """The buffer is named, and the micro-batch; training afterwards is that without an autopsy, bit for bit."""
    watch = Autopsies()
    left, plain = train(edit, value, watch, micro), train(edit, value, None, micro)
    assert all(torch.equal(left[name], plain[name]) for name in plain)
    (autopsy,) = [a for a in watch.autopsies if a.cause == cause]
    assert (autopsy.step, autopsy.parameter, autopsy.window_index) == (2, "temperature", micro)


@pytest.mark.parametrize("micro", [0, 1])
def test_the_seventh_call_is_the_seventh_call_again(micro):
    """A counter that forwards advance follows in the replay, with an edit of the loop next to it or without."""
    watch = Autopsies()
    train(filled, 0.5, watch, micro)
    autopsy = watch.autopsies[0]  # the third window counts from there again
    assert (autopsy.step, autopsy.cause, autopsy.op, autopsy.window_index) == (3, "forward", "div", 0)


def test_an_edit_before_the_next_window_is_not_in_the_replay_of_this_one():
    """On a GPU the outcome arrives when the next window has begun; the loop has set its temperature by then."""

    class Late:
        replay, autopsies, pending = True, (), None

        def delivered(self, result):
            self.pending = result if result.skipped else self.pending

        def between(self, engine):
            if self.pending is not None:
                self.autopsies = (*self.autopsies, examine(engine.replays, self.pending.step, 1.0))
                self.pending = None

    watch = Late()
    left, plain = train(filled, math.nan, watch, 0, between=watch.between), train(filled, math.nan, None, 0)
    assert all(torch.equal(left[name], plain[name]) for name in plain)
    assert (watch.autopsies[0].cause, watch.autopsies[0].parameter) == ("weights", "temperature")


def test_an_edit_that_nothing_counts_is_listed_among_the_reasons():
    """A write through `.data` leaves no trace: the report names that as a possible reason."""
    watch = Autopsies()
    train(as_data, math.nan, watch, steps=2)
    (autopsy,) = watch.autopsies
    assert autopsy.cause == "not reproduced"
    assert "through .data" in autopsy.advice


def test_an_edit_between_two_forwards_of_a_micro_batch_is_noted():
    """The function of step(replay=...) computes both in one go."""
    torch.manual_seed(0)
    model, watch, x = Tempered(), Autopsies(), torch.randn(5, 4)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", watch=watch)

    def compute():
        return model(x).square().mean()

    with engine.forward():
        first = compute()
    replaced(model, math.inf)
    with engine.forward():
        second = compute()
    engine.backward(first + second)
    assert engine.step(replay=lambda: compute() + compute()).skipped
    engine.close()
    assert "between two forwards of a micro-batch" in watch.autopsies[0].notes[0]
