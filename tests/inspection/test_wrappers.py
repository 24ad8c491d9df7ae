"""Models and optimizers inside wrappers."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep.inspection.wrappers import optimizer_chain, parts_of


class Outer:
    """As Accelerate's and Megatron's optimizers: not torch's class, and torch's inside."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state


def test_names_are_those_of_the_model_itself():
    """DataParallel and a compiled part add no level to names."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1] = torch.compile(model[1], backend="eager")
    parts = parts_of(nn.DataParallel(model), None, None, None)
    assert list(parts.params) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert parts.wrappers == ("DataParallel",)
    assert parts.is_compiled


def test_states_of_a_wrapped_optimizer_count_once():
    """A wrapper that shares states and groups with what it wraps does not double them."""
    model = nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    inner.step()
    assert list(optimizer_chain(Outer(Outer(inner))))[-1] is inner
    plain, wrapped = halfstep.inspect(model, inner), halfstep.inspect(model, Outer(Outer(inner)))
    assert plain.as_dict() == wrapped.as_dict()
    with halfstep.inspect(model, Outer(inner)) as inspection:
        inner.step()
    inspection.expect(step="applied")


def test_tied_weights_count_once():
    """A weight in two places is one weight."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert halfstep.inspect(model).result.num_parameters == 16


def test_lazy_modules_are_rejected_by_name():
    """Parameters without a shape cannot be counted."""
    with pytest.raises(halfstep.HalfstepError, match="0.weight"):
        halfstep.inspect(nn.Sequential(nn.LazyLinear(2)))


def test_models_that_are_none_are_rejected():
    """What is neither a module nor a collection of modules raises."""
    with pytest.raises(halfstep.HalfstepError):
        halfstep.inspect(3)
