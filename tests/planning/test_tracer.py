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
        tracer = Tracer(lambda *_: {})
        tracer.phase = "forward"
        with tracer:
            yield tracer


def sizes(tracer):
    """Bytes allocated and, negative, freed, in order."""
    blocks = {e.block: e.num_bytes for e in tracer.events if e.num_bytes is not None}
    return [blocks[e.block] if e.num_bytes is not None else -blocks[e.block] for e in tracer.events]


def test_views_share_their_storage(tracer):
    """A view allocates nothing, and the storage is freed with its last tensor."""
    x = torch.empty(100)
    y = x[10:].view(9, 10).t()
    del x
    assert sizes(tracer) == [400]
    del y
    assert sizes(tracer) == [400, -400]


def test_in_place_operations_allocate_nothing(tracer):
    """An operation that changes its input allocates nothing."""
    x = torch.zeros(8)
    x.add_(1).mul_(2)
    assert sizes(tracer) == [32]


def test_saved_tensors_live_until_backward(tracer):
    """Tensors that autograd saves live until the backward pass, and no longer."""
    w = torch.randn(8, requires_grad=True)
    loss = w.exp().sum()
    tracer.end_forward()
    alive = sum(sizes(tracer))
    loss.backward()
    del loss
    assert alive == 32 + 32 + 4  # w, the result of exp, the loss
    assert sum(sizes(tracer)) == 32 + 32  # w and its gradient


def test_categories_are_assigned_afterwards(tracer):
    """Blocks that are alive at the end of the forward pass are activations; the others are temporaries."""
    x = torch.randn(4, requires_grad=True)
    saved = (x * 2 + 1).exp()
    tracer.end_forward()
    categories = [e.category for e in tracer.categorized() if e.num_bytes is not None]
    assert categories == ["activations", "temporaries", "temporaries", "activations"]
    del saved


def test_modules_are_named():
    """An event records the module that was running."""
    mode = new_mode()
    model = build_model(small_job(), mode, RunContext())
    with mode:
        tracer = Tracer(lambda *_: {})
        tracer.ignore_model(model)
        x = torch.empty(2, 16)
        with tracer, tracer.modules():
            out = model(x)
    assert [e.module for e in tracer.events if e.num_bytes is not None] == ["0", "1", "2"]
    del out


def test_tied_weights_stay_tied():
    """One parameter in two places becomes one fake parameter, also in lists inside modules."""
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4))
    tied[1].weight = tied[0].weight
    model = build_model(small_job(model=lambda: tied), new_mode(), RunContext(), real=True)
    assert model[0].weight is model[1].weight
    assert model[2]._flat_weights[0] is model[2].weight_ih_l0
