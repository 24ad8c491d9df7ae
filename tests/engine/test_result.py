"""StepResult: values that come when they are read."""

import math

import pytest

from halfstep.engine.result import StepResult


def test_between_boundaries_nothing_was_decided():
    """While accumulating, skipped is False and the other values are None."""
    result = StepResult(3, boundary=False, lr=0.1)
    assert (result.step, result.boundary, result.lr) == (3, False, 0.1)
    assert result.skipped is False
    assert result.grad_norm is None
    assert result.scale is None
    assert repr(result) == "StepResult(step=3, boundary=False, lr=0.1)"


@pytest.mark.parametrize("name", ["skipped", "grad_norm", "scale"])
def test_reading_a_value_waits_once(name):
    """The first read of any value waits for delivery; later reads do not."""
    waits = []

    def wait():
        waits.append(1)
        result.fill(1.0, math.inf, 1024.0)

    result = StepResult(1, boundary=True, lr=1e-3, wait=wait)
    assert waits == []
    assert getattr(result, name) in {True, math.inf, 1024.0}
    assert (result.skipped, result.grad_norm, result.scale) == (True, math.inf, 1024.0)
    assert len(waits) == 1


def test_delivered_values_are_not_waited_for():
    """After fill nothing waits."""
    result = StepResult(1, boundary=True, lr=1e-3, wait=lambda: pytest.fail("waited"))
    result.fill(0.0, 2.5, 1.0)
    assert (result.skipped, result.grad_norm, result.scale) == (False, 2.5, 1.0)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ((0.0, 2.5, 65536.0), "skipped=False, grad_norm=2.5, scale=65536, lr=0.001"),
        ((1.0, math.inf, 2.0), "skipped=True, grad_norm=inf, scale=2, lr=0.001"),
        ((1.0, math.nan, 1.0), "skipped=True, grad_norm=nan, scale=1, lr=0.001"),
        ((0.0, 0.000123456, 1.0), "skipped=False, grad_norm=0.0001235, scale=1, lr=0.001"),
    ],
)
def test_the_text_shows_what_happened(values, shown):
    """One readable line, non-finite norms included."""
    result = StepResult(7, boundary=True, lr=1e-3)
    result.fill(*values)
    assert repr(result) == f"StepResult(step=7, boundary=True, {shown})"


@pytest.mark.parametrize("wait", [None, lambda: None], ids=["nobody delivers", "delivery was dropped"])
def test_a_result_that_never_arrives_can_still_be_shown(wait):
    """After load_state_dict the outcomes under way are dropped; printing such a result must not raise."""
    result = StepResult(7, boundary=True, lr=1e-3, wait=wait)
    assert result.grad_norm is None
    assert "step=7" in repr(result)


def test_a_result_takes_no_other_attributes():
    """A typing error in an attribute's name is an error."""
    with pytest.raises(AttributeError):
        StepResult(1, boundary=False, lr=0.1).grad_nrom = 1
