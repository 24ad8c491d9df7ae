"""Errors about dtypes name their module."""

import pytest
import torch
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.engine.replay.dtype_errors import dtype_errors_named


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Conv1d(3, 2, 1))

    def forward(self, x):
        return self.second[1](self.second[0](self.first(x)).unsqueeze(-1))


@pytest.mark.parametrize("name", ["first", "second.0", "second.1"])
def test_the_module_and_both_dtypes_are_in_a_note(name):
    """Of the module whose weights have another dtype than its input."""
    model = Outer()
    model.get_submodule(name).bfloat16()
    with pytest.raises(RuntimeError) as caught, dtype_errors_named(model):
        model(torch.ones(2, 3))
    (note,) = caught.value.__notes__
    assert f"({name})" in note
    assert "weight bfloat16" in note
    assert "float32" in note


def test_other_errors_have_no_note():
    """Shapes that do not fit are not about dtypes."""
    with pytest.raises(RuntimeError) as caught, dtype_errors_named(Outer()):
        Outer()(torch.ones(2, 4))
    assert not hasattr(caught.value, "__notes__")


def test_an_error_outside_every_module_has_no_note():
    """There is no module to name."""
    with pytest.raises(RuntimeError) as caught, dtype_errors_named(nn.Identity()):
        torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.bfloat16)
    assert not hasattr(caught.value, "__notes__")


def test_the_engine_names_the_module_in_its_forward_block():
    """autocast is switched off inside the model, a common cause."""
    model = Outer()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-lean")
    with pytest.raises(RuntimeError) as caught, engine.forward(), torch.autocast("cpu", enabled=False):
        model(torch.ones(2, 3))
    assert any("(first)" in note for note in caught.value.__notes__)
