"""Watch.record: autopsies of skipped steps in a loop of one's own."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.errors import SettingError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.overflows = False

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return x + self.second(hidden * 1e30 * 1e30 if self.overflows else hidden)


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Dropout(0.5), Block(), nn.Linear(8, 2))


def loss_of(model, x, y, fault):
    model[2].overflows = fault
    return F.cross_entropy(model(x), y)


def train(way, *, faults=(), steps=6, accumulate=1, watched=True):
    """Train a loop with a scaler, with a Guard on a stock or a fused optimizer; returns the model and the Watch."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=way == "fused")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if way == "scaler" else None
    guard = None if scaler is not None else halfstep.Guard(optimizer)
    watch = halfstep.Watch(model).attach(optimizer, scaler) if watched else None
    data = torch.Generator().manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        for index in range(accumulate):
            x, y = torch.randn(4, 8, generator=data), torch.tensor([0, 1, 1, 0])
            compute = functools.partial(loss_of, model, x, y, (step, index) in faults)
            if watch is not None:
                watch.record(compute, 1 / accumulate)
            loss = compute() / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    if watch is not None:
        watch.close()
    if guard is not None:
        guard.close()
    return model, watch


@pytest.mark.parametrize("way", ["scaler", "guard", "fused"])
def test_the_module_that_overflowed_is_named(way):
    """Step, cause, module and micro-batch of an overflow in the second micro-batch of the third step."""
    _, watch = train(way, faults={(2, 1)}, accumulate=2)
    (autopsy,) = watch.autopsies
    assert (autopsy.step, autopsy.cause, autopsy.module, autopsy.window_index) == (3, "forward", "2", 1)
    kinds = [(event.kind, event.step) for event in watch.events]
    assert kinds[:2] == [("skip", 3), ("autopsy", 3)]


@pytest.mark.parametrize("way", ["scaler", "guard", "fused"])
def test_training_continues_bit_for_bit(way):
    """A loop that was watched and replayed, with dropout, ends with the weights of one that was not."""
    weights = [train(way, faults={(1, 0)}, watched=watched)[0].state_dict() for watched in (True, False)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert all(value.isfinite().all() for value in weights[0].values())


def test_healthy_steps_are_not_examined():
    """No autopsy, no event, and no record is left."""
    _, watch = train("guard")
    assert not watch.autopsies
    assert not watch.events


def test_a_guard_that_is_closed_leaves_the_watch_on_the_optimizer():
    """Its steps are still counted."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = halfstep.Guard(optimizer)
    watch = halfstep.Watch(model, every=1).attach(optimizer)
    for _ in range(4):
        F.cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 1, 0])).backward()
        optimizer.step()
        guard.close()
    watch.close()
    assert [sample.step for sample in watch.samples] == [1, 2, 3, 4]


def test_record_is_rejected_where_it_would_have_no_effect():
    """Before attach, with replay=False, with an Engine and with several optimizers."""
    model = build()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.raises(SettingError, match="attach"):
        halfstep.Watch(model).record(lambda: None)
    with pytest.raises(SettingError, match="replay=False"):
        halfstep.Watch(model, replay=False).attach(first).record(lambda: None)
    with pytest.raises(SettingError, match="one optimizer"):
        halfstep.Watch(model).attach([first, second]).record(lambda: None)
    watch = halfstep.Watch()
    with (
        halfstep.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=watch),
        pytest.raises(SettingError, match="engine.step"),
    ):
        watch.record(lambda: None)
