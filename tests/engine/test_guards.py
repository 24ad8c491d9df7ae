"""Gradients that changed outside the Engine, and gradients set aside during a forward."""

import pytest
import torch
from torch import nn

from halfstep.engine.guards import GradientGuard
from halfstep.errors import SettingError


def layer():
    return nn.Linear(3, 2)


def backward(model):
    model(torch.ones(1, 3)).sum().backward()


@pytest.fixture
def guarded():
    model = layer()
    return model, GradientGuard(dict(model.named_parameters()))


def test_untouched_gradients_pass(guarded):
    """None at the start, the Engine's own after backward, accumulated ones after remembering again."""
    model, guard = guarded
    guard.check("backward")
    for _ in range(3):
        backward(model)
        guard.record()
        guard.check("step")
        guard.check("backward")
    model.zero_grad()
    guard.forget()
    guard.check("backward")


def test_gradients_from_elsewhere_are_detected(guarded):
    """A bare loss.backward() before any of the Engine's."""
    model, guard = guarded
    backward(model)
    with pytest.raises(
        SettingError, match=r"step\(\): there are gradients that engine.backward\(\) did not compute \(weight, bias\)"
    ):
        guard.check("step")
    with pytest.raises(SettingError, match=r"Write engine.backward\(loss\).*model.zero_grad\(\)"):
        guard.check("backward")


@pytest.mark.parametrize(
    "touch",
    [
        backward,
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda model: model.weight.grad.mul_(2),
        lambda model: model.weight.grad.zero_(),
        lambda model: setattr(model.weight, "grad", torch.zeros(2, 3)),
    ],
    ids=["bare backward", "clip_grad_norm_", "edited", "zeroed", "replaced"],
)
def test_changed_gradients_are_detected(guarded, touch):
    """Clipping, editing, replacing, or adding to gradients that are still scaled."""
    model, guard = guarded
    backward(model)
    guard.record()
    touch(model)
    with pytest.raises(SettingError, match=r"changed since engine.backward\(\).*max_norm=.*engine.unscale\(\)"):
        guard.check("step")


def test_cleared_gradients_are_detected(guarded):
    """optimizer.zero_grad() between backward and step throws the gradients away."""
    model, guard = guarded
    backward(model)
    guard.record()
    model.zero_grad()
    with pytest.raises(
        SettingError, match=r"unscale\(\): the gradients of weight, bias were cleared.*remove optimizer.zero_grad"
    ):
        guard.check("unscale")


def test_cleared_and_remade_gradients_are_detected():
    """zero_grad and a bare backward in a row: new tensors may get the old ones' addresses, and must not pass for them."""
    for _ in range(50):
        model = nn.Linear(3, 1, bias=False)
        guard = GradientGuard(dict(model.named_parameters()))
        backward(model)
        guard.record()
        model.weight.grad = None
        model.weight.grad = torch.zeros(1, 3)
        with pytest.raises(SettingError, match="changed since"):
            guard.check("step")


def test_a_parameter_that_gets_a_gradient_late_is_detected(guarded):
    """One gradient more than after backward is a change too."""
    model, guard = guarded
    backward(model)
    model.bias.grad = None
    guard.record()
    model.bias.grad = torch.ones(2)
    with pytest.raises(SettingError, match="the gradients of bias changed"):
        guard.check("step")


def test_gradients_are_moved_out_of_a_graph_once_a_window():
    """A copy takes the place of each gradient, later ones add to it in place, and an edit is still noticed."""
    model = layer()
    guard = GradientGuard(dict(model.named_parameters()), in_graphs=True)
    with guard.set_aside():  # nothing there yet
        pass
    backward(model)
    guard.record()
    inside = model.weight.grad
    with guard.set_aside():
        inside.fill_(torch.nan)  # what a replay does to it
    guard.check("backward")
    assert torch.equal(model.weight.grad, torch.ones(2, 3))
    kept = model.weight.grad
    backward(model)
    guard.record()
    with guard.set_aside():
        pass
    assert model.weight.grad is kept
    assert torch.equal(kept, torch.full((2, 3), 2.0))
    guard.forget()
    guard.record()
    model.bias.grad.mul_(2)
    with guard.set_aside():
        pass
    with pytest.raises(SettingError, match="gradients of bias changed"):
        guard.check("step")


def test_hidden_gradients_come_back_as_they_were():
    """No weight has a gradient inside the block, after it each has its own; one made inside stays and is noticed."""
    model = layer()
    guard = GradientGuard(dict(model.named_parameters()), hide=True)
    backward(model)
    guard.record()
    before = model.weight.grad
    with pytest.raises(ZeroDivisionError), guard.set_aside():
        assert model.weight.grad is None
        raise ZeroDivisionError
    assert model.weight.grad is before
    guard.check("step")
    with guard.set_aside():
        guard.check("backward")  # inside the block
        assert model.weight.grad is before
    with guard.set_aside():
        backward(model)
    with pytest.raises(SettingError, match="gradients of weight, bias changed"):
        guard.check("step")


def test_gradients_dropped_during_a_forward_do_not_come_back():
    """A window that is reset inside the block stays empty."""
    model = layer()
    guard = GradientGuard(dict(model.named_parameters()), hide=True)
    backward(model)
    guard.record()
    with guard.set_aside():
        guard.forget()
    assert model.weight.grad is None


def test_gradients_that_are_not_in_the_way_stay_where_they_are(guarded):
    """Moving costs a copy, so nobody else pays it."""
    model, guard = guarded
    backward(model)
    before = model.weight.grad
    with guard.set_aside():
        assert model.weight.grad is before
    assert model.weight.grad is before


def test_long_lists_of_names_are_cut():
    """Three names and a count are enough."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    guard = GradientGuard(dict(model.named_parameters()))
    backward(model)
    with pytest.raises(SettingError, match=r"\(0.weight, 0.bias, 1.weight and 5 more\)"):
        guard.check("step")


def test_an_update_without_any_gradient_is_detected(guarded):
    """After unscale() gradients may be edited, and some may be cleared, but not all of them."""
    model, guard = guarded
    backward(model)
    guard.check_present("step")
    model.weight.grad = None
    guard.check_present("step")
    model.zero_grad()
    with pytest.raises(SettingError, match=r"step\(\): all gradients were cleared since engine.unscale\(\)"):
        guard.check_present("step")
