"""Following storages through operations on fake tensors."""

import pytest
import torch
from torch import nn

from halfstep.backends.context import RunContext
from halfstep.planning.fakes import build_model, new_mode
from halfstep.planning.tracer import Tracer
from planning_jobs import small_job


@pytest.fixture
def tracer():
    """A tracer under a fake mode, in its forward phase."""
    with new_mode():
        found = Tracer(lambda *_: {})
        found.phase = "forward"
        with found:
            yield found


def sizes(tracer):
    """Bytes taken and given, in order."""
    blocks = {e.block: e.num_bytes for e in tracer.lines if e.num_bytes is not None}
    return [blocks[e.block] if e.num_bytes is not None else -blocks[e.block] for e in tracer.lines]


def test_views_share_their_storage(tracer):
    """A view takes nothing, and the storage is given back with its last tensor."""
    x = torch.empty(100)
    y = x[10:].view(9, 10).t()
    del x
    assert sizes(tracer) == [400]
    del y
    assert sizes(tracer) == [400, -400]


def test_in_place_operations_take_nothing(tracer):
    """An operation that changes its input allocates nothing."""
    x = torch.zeros(8)
    x.add_(1).mul_(2)
    assert sizes(tracer) == [32]


def test_autograd_keeps_what_it_saves(tracer):
    """What a backward formula needs lives until the backward pass, and no longer."""
    w = torch.randn(8, requires_grad=True)
    loss = w.exp().sum()
    tracer.end_forward()
    alive = sum(sizes(tracer))
    loss.backward()
    del loss
    assert alive == 32 + 32 + 4  # w, the result of exp, the loss
    assert sum(sizes(tracer)) == 32 + 32  # w and its gradient


def test_causes_are_settled_afterwards(tracer):
    """Forward blocks that live to its end are activations, the others were temporary."""
    x = torch.randn(4, requires_grad=True)
    kept = (x * 2 + 1).exp()
    tracer.end_forward()
    causes = [e.cause for e in tracer.settled() if e.num_bytes is not None]
    assert causes == ["activations", "temporaries", "temporaries", "activations"]
    del kept


def test_modules_are_named():
    """A block knows the module that was running."""
    mode = new_mode()
    model = build_model(small_job(), mode, RunContext())
    with mode:
        tracer = Tracer(lambda *_: {})
        tracer.know_weights(model)
        x = torch.empty(2, 16)
        with tracer, tracer.modules():
            kept = model(x)
    assert [e.module for e in tracer.lines if e.num_bytes is not None] == ["0", "1", "2"]
    del kept


def test_tied_weights_stay_tied():
    """One parameter in two places is one fake parameter, also in lists that modules keep."""
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4))
    tied[1].weight = tied[0].weight
    model = build_model(small_job(model=lambda: tied), new_mode(), RunContext(), real=True)
    assert model[0].weight is model[1].weight
    assert model[2]._flat_weights[0] is model[2].weight_ih_l0
