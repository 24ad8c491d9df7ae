"""What `compile=` may say."""

import re

import pytest
import torch
from torch import nn

from halfstep.compiling import MODES, check_compile, compile_model, parse_compile, records_graphs
from halfstep.engine import Engine
from halfstep.errors import SettingError


def test_the_modes_are_those_torch_documents():
    """The line of torch.compile's documentation that lists its modes lists these."""
    (line,) = (line for line in torch.compile.__doc__.splitlines() if line.strip().startswith("mode (str)"))
    assert tuple(re.findall(r'"([\w-]+)"', line)) == MODES


@pytest.mark.parametrize(
    ("text", "value"),
    [("on", True), ("TRUE", True), ("off", False), ("0", False), ("default", True), ("max-autotune", "max-autotune")],
)
def test_a_text_is_a_switch_or_a_mode(text, value):
    """On, off, or the mode's own name; torch's default mode is plainly on."""
    assert parse_compile(text) is value or parse_compile(text) == value


@pytest.mark.parametrize("bad", ["maybe", "", 1, None, 2.0])
def test_anything_else_is_refused_with_the_modes(bad):
    """The message names what was given and every mode."""
    with pytest.raises(SettingError, match="reduce-overhead, max-autotune") as caught:
        check_compile(bad)
    assert repr(bad) in str(caught.value)


def test_an_engine_refuses_before_it_changes_the_model():
    """A wrong mode leaves the weights as they were."""
    model = nn.Linear(2, 2)
    with pytest.raises(SettingError, match="neither on nor off"):
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-lean", compile="fast")
    assert model.weight.dtype is torch.float32


@pytest.mark.parametrize("mode", [*MODES, True, False])
def test_graphs_are_recorded_on_a_gpu_in_two_modes(mode):
    """reduce-overhead and max-autotune, and nowhere on a CPU."""
    assert records_graphs(mode, torch.device("cuda")) == (mode in {"reduce-overhead", "max-autotune"})
    assert not records_graphs(mode, torch.device("cpu"))


@pytest.mark.parametrize(("setting", "given"), [(True, None), ("max-autotune", "max-autotune")])
def test_the_mode_reaches_torch(monkeypatch, setting, given):
    """The model is compiled in place in the mode that was asked for; off compiles nothing."""
    seen = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: seen.append((self, options)))
    model = nn.Linear(1, 1)
    compile_model(model, False)
    assert seen == []
    compile_model(model, setting)
    assert seen == [(model, {"mode": given})]
