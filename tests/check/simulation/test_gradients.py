"""The model of torch's scaler: it raises where torch does, and reports gradients of the wrong scale."""

import ast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.check.simulation.gradients import Gradients, Raised
from halfstep.check.simulation.values import Optimizer, Scaler, Tensor

NODE = ast.parse("x").body[0]
CALLS = st.lists(st.sampled_from(["backward", "clear", "unscale", "step", "update"]), max_size=12)


class Simulated:
    """One optimizer and one scaler of the simulation."""

    def __init__(self):
        self.gradients, self.scaler, self.optimizer = Gradients(), Scaler("scaler", True, None), Optimizer("opt", None)
        self.gradients.scalers.append(self.scaler)
        self.gradients.optimizers.append(self.optimizer)

    def backward(self, scaled=True, dtype="float16"):
        scaler = self.scaler if scaled else None
        self.gradients.backward(Tensor(frozenset({"model"}), frozenset({dtype}), scaler, self.scaler.version), NODE)

    def clear(self):
        self.gradients.clear(None, self.optimizer)

    def unscale(self):
        self.gradients.unscale(self.scaler, self.optimizer, NODE)

    def step(self):
        self.gradients.scaler_step(self.scaler, self.optimizer, NODE)

    def update(self):
        self.gradients.update(self.scaler, NODE)

    def codes(self):
        return [mishap.code for mishap in self.gradients.mishaps]


class Real:
    """The same calls of torch."""

    def __init__(self):
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def backward(self):
        self.scaler.scale(self.weight.sum()).backward()

    def clear(self):
        self.optimizer.zero_grad()

    def unscale(self):
        self.scaler.unscale_(self.optimizer)

    def step(self):
        self.scaler.step(self.optimizer)

    def update(self):
        self.scaler.update()


def place_of_error(world, calls, errors):
    """The index of the first call that raises; None if none does."""
    for index, call in enumerate(calls):
        try:
            getattr(world, call)()
        except errors:
            return index
    return None


@given(CALLS)
def test_what_raises_in_torch_raises_here(calls):
    """Every error of the simulation is an error of torch at the same call."""
    real, simulated = Real(), Simulated()
    # The scaler of torch is created by its first scale().
    calls = ["backward", *calls]
    place = place_of_error(simulated, calls, Raised)
    if place is not None:
        assert place_of_error(real, calls, (RuntimeError, AssertionError)) == place


@given(CALLS)
def test_what_raises_here_is_all_that_raises_in_torch(calls):
    """Where torch raises and the simulation does not, it has reported wrong gradients before."""
    calls = ["backward", *calls]
    simulated = Simulated()
    place = place_of_error(Real(), calls, (RuntimeError, AssertionError))
    if place is not None:
        own = place_of_error(simulated, calls, Raised)
        assert own == place or simulated.codes()


@given(CALLS)
def test_a_run_without_a_mishap_has_true_gradients(calls):
    """Whenever the simulation is silent, torch's steps got the gradients of the unscaled loss."""
    calls = ["backward", *calls]
    simulated, real = Simulated(), Real()
    if place_of_error(simulated, calls, Raised) is not None or simulated.codes():
        return
    pending, used = 0, []

    def record(*_, **__):
        gradient = real.weight.grad
        used.append((torch.zeros(2) if gradient is None else gradient.clone(), pending))

    real.optimizer.step = record
    for call in calls:
        getattr(real, call)()
        pending = 0 if call == "clear" else pending + (call == "backward")
    for gradient, count in used:
        assert torch.equal(gradient, torch.full((2,), float(count)))


@pytest.mark.parametrize(
    ("calls", "code"),
    [
        (["backward", "unscale", "unscale"], "HS105"),
        (["backward", "unscale", "backward", "unscale"], "HS106"),
        (["backward", "step", "step"], "HS114"),
        (["backward", "step", "unscale"], "HS105"),
        (["backward", "update"], "HS107"),
        (["backward", "clear", "update"], "HS115"),
        (["backward", "clear", "step"], "HS115"),
        (["backward", "step", "update", "backward", "step"], "HS156"),
        (["backward", "unscale", "backward", "step"], "HS108"),
    ],
)
def test_the_rule_of_each_mistake(calls, code):
    """A wrong sequence is reported under the rule that explains it."""
    simulated = Simulated()
    place_of_error(simulated, calls, Raised)
    assert simulated.codes() == [code]


def test_an_iteration_left_between_unscale_and_update():
    """The second `unscale_` raises because of the iteration that was skipped."""
    simulated = Simulated()
    simulated.backward()
    simulated.unscale()
    simulated.gradients.skips += 1
    simulated.clear()
    simulated.backward()
    with pytest.raises(Raised):
        simulated.unscale()
    assert simulated.codes() == ["HS112"]


def test_an_unscaled_loss_and_a_scaled_step():
    """The scaler divides gradients that were never multiplied."""
    simulated = Simulated()
    simulated.backward(scaled=False)
    simulated.step()
    assert simulated.codes() == ["HS102"]


@pytest.mark.parametrize(("dtype", "codes"), [("float16", ["HS123"]), ("bfloat16", []), ("", [])])
def test_float16_without_a_scaler(dtype, codes):
    """Only a loss that is certainly of a float16 region counts."""
    simulated = Simulated()
    simulated.backward(scaled=False, dtype=dtype)
    simulated.gradients.step(simulated.optimizer, NODE)
    assert simulated.codes() == codes


def test_a_step_and_a_clip_on_scaled_gradients():
    """Both get gradients that are multiplied with the scale."""
    simulated = Simulated()
    simulated.backward()
    simulated.gradients.clip(frozenset({"model"}), NODE)
    simulated.gradients.step(simulated.optimizer, NODE)
    assert simulated.codes() == ["HS104", "HS103"]


def test_nothing_is_reported_after_code_of_another_file_until_the_gradients_are_cleared():
    """What it did is not known."""
    simulated = Simulated()
    simulated.backward()
    simulated.gradients.lose(optimizer=simulated.optimizer)
    simulated.gradients.clip(frozenset({"model"}), NODE)
    assert simulated.codes() == []
    simulated.clear()
    simulated.backward()
    simulated.gradients.clip(frozenset({"model"}), NODE)
    simulated.step()
    assert simulated.codes() == ["HS104"]


def test_of_several_optimizers_only_those_of_the_models_count():
    """A clip of one model's gradients says nothing about the other's."""
    simulated = Simulated()
    simulated.optimizer.models = frozenset({"model"})
    simulated.gradients.optimizers.append(Optimizer("other", frozenset({"other"})))
    simulated.backward()
    simulated.gradients.clip(frozenset({"other"}), NODE)
    assert simulated.codes() == []
    simulated.gradients.clip(frozenset({"model.head"}), NODE)
    simulated.step()
    assert simulated.codes() == ["HS104"]
