"""What counts as a run that did not train."""

import math

import pytest

from halfstep.train.health import describe_problem

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
