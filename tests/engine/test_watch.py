"""The protocol of Engine(watch=...)."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.engine.watch import METHODS, EngineWatch
from halfstep.errors import SettingError


class Recording:
    """Writes down what the Engine calls."""

    def __init__(self):
        self.calls = []

    def attach(self, engine):
        self.calls.append(("attach", sorted(engine.params)))

    def before_step(self, gradients, divisor):
        self.calls.append(("before_step", sorted(gradients), divisor.item(), gradients["weight"].abs().max().item()))

    def after_step(self, result):
        self.calls.append(("after_step", result.step))

    def delivered(self, result):
        self.calls.append(("delivered", result.step, result.skipped))

    def close(self):
        self.calls.append(("close",))


def train(watch, precision="fp16", poison=False):
    """One step of a linear layer under a watch."""
    model = nn.Linear(3, 2)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, watch=watch)
    with engine.forward():
        loss = F.mse_loss(model(torch.ones(2, 3)), torch.zeros(2, 2))
    engine.backward(loss * float("inf") if poison else loss)
    engine.step()
    engine.close()


def test_every_method_of_the_protocol_is_called_in_order():
    """Attached once; before and after each update; told the outcome; closed."""
    watch = Recording()
    train(watch, "fp32")
    assert [call[0] for call in watch.calls] == ["attach", "before_step", "after_step", "delivered", "close"]
    assert watch.calls[0] == ("attach", ["bias", "weight"])
    assert watch.calls[3] == ("delivered", 1, False)


def test_gradients_arrive_scaled_with_their_divisor():
    """Dividing by the divisor gives the true gradients, whatever the loss scale is."""
    true = []
    for precision in ("fp32", "fp16"):
        torch.manual_seed(0)
        watch = Recording()
        train(watch, precision)
        _, names, divisor, largest = watch.calls[1]
        assert names == ["bias", "weight"]
        true.append(largest / divisor)
    assert true[0] == pytest.approx(true[1], rel=1e-2)


def test_a_skipped_step_is_delivered_as_skipped():
    """The outcome that is delivered is that of the step."""
    watch = Recording()
    train(watch, poison=True)
    assert ("delivered", 1, True) in watch.calls


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_optional(method):
    """An object with one method of the protocol is enough."""
    calls = []
    watch = type("One", (), {method: lambda self, *args: calls.append(method)})()
    train(watch)
    assert calls == [method]


def test_an_object_without_any_method_is_rejected():
    """A watch that could never be called is a mistake."""
    with pytest.raises(SettingError, match="has none of the methods attach"):
        train(object())


def test_the_protocol_names_the_methods():
    """The typed protocol and the list that is checked are the same."""
    assert {name for name in vars(EngineWatch) if not name.startswith("_")} == set(METHODS)
