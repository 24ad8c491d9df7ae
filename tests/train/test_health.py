"""What counts as a run that did not train."""

import math

import pytest
import torch

from halfstep.engine.engine import Engine
from halfstep.train.health import describe_problem, nonfinite_parameters


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_parameters_are_checked_and_buffers_are_not(value):
    """A buffer may contain -inf, such as a mask; a weight may not."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model.register_buffer("mask", torch.full((2,), -math.inf))
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32") as engine:
        assert nonfinite_parameters(engine) == []
        with torch.no_grad():
            model[1].weight[1, 0] = value
        assert nonfinite_parameters(engine) == ["1.weight"]


HEALTHY = {"steps": 2, "applied": 1, "loss": 0.5, "scale": 1.0, "validation": {"loss": 0.5}, "nonfinite": []}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"validation": {}}, None),
        ({"validation": {"loss": 0.5, "metric": math.nan}}, None),
        ({"steps": 0, "applied": 0, "loss": None}, None),
        ({"applied": 0}, "so nothing was trained"),
        ({"applied": 0, "scale": 65536.0}, "The loss scale is 65536 and still falls"),
        ({"applied": 0, "steps": 1, "loss": math.nan, "scale": 65536.0}, "the only step was skipped"),
        ({"loss": math.nan}, "training loss is nan"),
        ({"validation": {"loss": math.inf}}, "validation loss is inf"),
        ({"nonfinite": ["a", "b"]}, "weights are not finite (in a, b)"),
    ],
)
def test_the_problem_of_a_run(changed, problem):
    """The most basic problem is the one that is reported."""
    text = describe_problem(**(HEALTHY | changed))
    assert text is None if problem is None else problem in text
