"""What `compile=` may say."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.engine.compiling import MODES, check_compile, compile_model, parse_compile, records_graphs
from halfstep.engine.engine import Engine
from halfstep.errors import SettingError


class Twice(nn.Module):
    """A module of somebody's own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(self.layer(x))


class Classifier(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x)


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
def test_anything_else_is_rejected_with_the_modes(bad):
    """The message names what was given and every mode."""
    with pytest.raises(SettingError, match="reduce-overhead, max-autotune") as caught:
        check_compile(bad)
    assert repr(bad) in str(caught.value)


def test_an_engine_rejects_before_it_changes_the_model():
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
    model = Twice()
    compile_model(model, False)
    assert seen == []
    compile_model(model, setting)
    assert seen == [(model, {"mode": given})]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch by its own compiler, in some versions
@pytest.mark.parametrize(
    ("make", "num_calls"),
    [
        (
            lambda: nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 8)),
            3,
        ),  # of which torch's own compile() takes nothing
        (lambda: nn.Sequential(Twice(), Twice()), 4),  # and here two halves
        (Twice, 2),
    ],
)
def test_the_whole_model_is_compiled(monkeypatch, make, num_calls):
    """One graph holds every call, also of a model that consists of torch's own modules; the result is eager's."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode=None: compiler(model, backend=backend))
    torch._dynamo.reset()
    model, x = make(), torch.randn(3, 8)
    expected = model(x)
    compile_model(model, True)
    assert torch.equal(model(x), expected)
    assert graphs == [num_calls]
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), expected)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch by its own compiler, in some versions
@pytest.mark.parametrize("precision", ["bf16", "bf16-lean", "fp16-lean", "bf16-lean,grads=bf16"])
def test_a_model_compiled_again_within_a_window_is_one_graph(precision):
    """Batches of two sizes and a validation between micro-batches recompile; weights with fp32 gradients still trace whole."""
    losses = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Classifier()
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision, accumulate=3)
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)  # a break is an error
        seen = []
        for i in range(9):
            x, y = torch.randn(6 + (i % 3 == 0), 8), torch.randint(0, 4, (6 + (i % 3 == 0),))
            with engine.forward():
                loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            with engine.evaluate():
                seen += [loss.item(), F.cross_entropy(model(x), y).item()]
            engine.step()
        assert engine.progress.applied == 3
        losses.append(seen)
    torch._dynamo.reset()
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
