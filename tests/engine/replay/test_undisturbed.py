"""A block that leaves no trace."""

import pytest
import torch
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.engine.replay.undisturbed import BufferCopies, compute_losses, undisturbed


class Replacing(nn.Module):
    """Buffers that are changed in place and replaced by new objects."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("changed", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("absent", None)

    def forward(self, x):
        self.changed += 1
        self.replaced = self.replaced + 1
        self.absent = torch.ones(1)
        return self.layer(x)


def build():
    model = Replacing()
    return model, Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")


def test_buffers_come_back_as_objects_and_contents():
    """Changed in place, replaced, and added where there was None."""
    model = Replacing()
    copies, objects = BufferCopies(model), dict(model._buffers)
    model(torch.ones(1, 2))
    copies.restore()
    assert all(model._buffers[name] is objects[name] for name in objects)
    assert model.changed.tolist() == [0, 0]
    assert model.replaced == 0


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_modes_and_generators_are_put_back_even_after_an_error(fails):
    """The same gradient objects, so that the Engine's guard accepts them."""
    model, engine = build()
    with engine.forward():
        loss = model(torch.ones(1, 2)).sum()
    engine.backward(loss)
    before, rng = [p.grad for p in model.parameters()], torch.get_rng_state()
    values = [grad.clone() for grad in before]
    with pytest.raises(KeyError) if fails else torch.no_grad(), undisturbed(engine.replays):
        assert torch.is_grad_enabled()
        assert all(p.grad is None for p in model.parameters())
        model.eval()
        model(torch.rand(1, 2)).sum().backward()
        if fails:
            raise KeyError
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    assert all(map(torch.equal, before, values))
    assert model.training
    assert torch.equal(rng, torch.get_rng_state())
    assert not engine.step().skipped


def test_a_replay_starts_from_the_buffers_of_its_window():
    """On a GPU the next forward has changed them when the outcome arrives."""

    class Asking:
        replay = True

        def attach(self, engine):
            """The protocol needs one method."""

    model = Replacing()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=Asking())
    seen = []

    def compute():
        seen.append(model.changed.tolist())
        return model(torch.ones(1, 2)).sum()

    for _ in range(2):
        with engine.forward():
            loss = compute()
        engine.backward(loss)
        engine.step(replay=compute)
    (batch,) = engine.replays.take(2)
    with undisturbed(engine.replays):
        engine.replays.buffers.load(batch.buffers)
        compute_losses(engine.replays, batch)
    assert seen == [[0, 0], [1, 1], [1, 1]]
    assert model.changed.tolist() == [2, 2]
