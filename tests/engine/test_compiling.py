"""What `compile=` may say."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.engine import compiling
from halfstep.engine.compiling import MODES, check_compile, compile_model, parse_compile, records_graphs, start_workers
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
    [
        ("on", True),
        ("TRUE", True),
        ("off", False),
        ("0", False),
        ("default", True),
        ("max-autotune", "max-autotune"),
        ("blocks", "blocks"),
    ],
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


@pytest.mark.parametrize(
    ("setting", "is_cuda", "num_calls"), [(True, True, 1), ("blocks", True, 1), (False, True, 0), ("blocks", False, 0)]
)
def test_the_compilers_workers_start_for_a_gpu(monkeypatch, setting, is_cuda, num_calls):
    """Only where kernels will be compiled: with the setting on, and parameters on a GPU."""
    from torch._inductor.async_compile import AsyncCompile

    calls = []
    monkeypatch.setattr(AsyncCompile, "wakeup", lambda: calls.append(1))
    start_workers(SimpleNamespace(parameters=lambda: [SimpleNamespace(is_cuda=is_cuda)]), setting)
    assert len(calls) == num_calls


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
@pytest.mark.parametrize(
    "precision",
    ["bf16-lean", *(pytest.param(p, marks=pytest.mark.slow) for p in ("bf16", "fp16-lean", "bf16-lean,grads=bf16"))],
)
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


def of_torch_by_its_own_compiler(test):
    """Ignore warnings that torch's compiler raises about itself; outside of tests, where they are errors, it hides them."""
    for warning in (
        "ignore::DeprecationWarning",
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    ):
        test = pytest.mark.filterwarnings(warning)(test)
    return test


class Norm(nn.LayerNorm):
    """A subclass, as libraries have."""


class Layer(nn.Module):
    """A residual block that knows its number."""

    def __init__(self, index, numbered=False):
        super().__init__()
        self.index, self.numbered = index, numbered
        self.norm, self.fc1, self.fc2 = Norm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = x + self.fc2(F.gelu(self.fc1(self.norm(x))))
        return x.roll(self.index, 0) if self.numbered else x


class Deep(nn.Module):
    """More layers than torch.compile compiles of one function."""

    def __init__(self, num_layers=10, numbered=False, layer=Layer):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(layer(i, numbered) for i in range(num_layers))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def quick_compiler(monkeypatch):
    """torch.compile without code generation, from a clean state; returns how many graphs it has compiled."""
    monkeypatch.setattr(compiling, "_options", lambda mode, budget: {"backend": "aot_eager"})
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def losses_of(model, setting, precision, num_steps=2, **options):
    """Losses of a few steps and of a validation."""
    torch.manual_seed(0)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision, compile=setting, **options)
    losses = []
    for _ in range(num_steps * options.get("accumulate", 1)):
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
        with engine.forward():
            loss = F.cross_entropy(model(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with engine.evaluate():
        losses.append(F.cross_entropy(model(x), y).item())
    engine.close()
    return losses


@of_torch_by_its_own_compiler
@pytest.mark.parametrize(
    ("precision", "options", "num_dtypes"),
    [
        ("fp32", {}, 1),
        # The first layer reads 16 bits, the others the sums with fp32.
        ("bf16-lean,keep_fp32=*.norm|*.fc2", {"recompute": "cheap"}, 2),
        pytest.param("bf16-lean", {"accumulate": 2}, 1, marks=pytest.mark.slow),
        pytest.param("bf16,keep_fp32=layers.*", {"recompute": "cheap"}, 2, marks=pytest.mark.slow),
        pytest.param("bf16-lean", {"recompute": "cheap"}, 1, marks=pytest.mark.slow),
    ],
)
def test_one_compiled_block_serves_all_of_a_stack(quick_compiler, precision, options, num_dtypes):
    """Ten layers are compiled once for each dtype of their input, in training and in validation, wrapped forwards included; results are eager's."""
    model = Deep()
    expected = losses_of(copy.deepcopy(model), False, precision, **options)
    names = list(model.state_dict())
    assert losses_of(model, "blocks", precision, **options) == pytest.approx(expected, rel=0.01)
    assert quick_compiler() == 2 * num_dtypes
    assert list(model.state_dict()) == names


@of_torch_by_its_own_compiler
def test_layers_of_torch_are_compiled_as_blocks(quick_compiler):
    """Of torch's own layers, whose functions the compiler skips, a function around each is one graph for all."""
    layer = lambda *_: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)  # noqa: E731 - of this test
    model = Deep(layer=layer)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", compile="blocks")
    x = torch.randn(2, 3, 8)
    with engine.forward():
        loss = model(x).square().mean()
    assert quick_compiler() == 1
    engine.backward(loss)
    engine.close()


@pytest.mark.slow  # compiles ten graphs
@of_torch_by_its_own_compiler
def test_blocks_that_differ_are_all_compiled_and_reported(quick_compiler, caplog):
    """Ten values of an attribute give ten graphs, not eight and eager for the rest; the limits are restored when the engine closes."""
    config = torch._dynamo.config
    before = config.recompile_limit, config.accumulated_recompile_limit
    model = Deep(numbered=True)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", compile="blocks")
    assert config.recompile_limit >= 10
    with engine.forward():
        loss = model(torch.randn(2, 8)).sum()
    engine.backward(loss)
    assert quick_compiler() == 10
    assert "5 of the 10 blocks in layers were compiled separately" in caplog.text
    engine.close()
    assert (config.recompile_limit, config.accumulated_recompile_limit) == before


@of_torch_by_its_own_compiler
def test_several_modules_are_compiled_by_their_blocks(quick_compiler):
    """Members of one Engine: the layers of both share their code."""
    actor, critic = Deep(2), Deep(3)
    params = [*actor.parameters(), *critic.parameters()]
    engine = Engine([actor, critic], torch.optim.SGD(params, lr=0.1), "fp32", compile="blocks")
    x = torch.randn(2, 8)
    with engine.forward():
        loss = actor(x).mean() + critic(x).mean()
    engine.backward(loss)
    assert quick_compiler() == 1
    engine.step()
    engine.close()


@of_torch_by_its_own_compiler
def test_a_model_without_repeated_blocks_is_compiled_as_a_whole(quick_compiler, caplog):
    """And the log states it."""
    model = Classifier()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", compile="blocks")
    model(torch.randn(2, 8))
    assert quick_compiler() == 1
    assert "Classifier has no repeated blocks; the whole model is compiled" in caplog.text
    engine.close()


def test_a_budget_is_set_while_a_graph_is_compiled(monkeypatch):
    """torch's share of activations to keep is patched around the compiler, and restored; the mode is passed on."""
    budgets = []

    def compiler(graph, inputs, options=None):
        budgets.append((torch._functorch.config.activation_memory_budget, options))
        return graph

    monkeypatch.setattr(torch._inductor, "compile", compiler)
    before = torch._functorch.config.activation_memory_budget
    assert compiling._options(None, 0.5)["backend"]("graph", []) == "graph"
    assert compiling._options("max-autotune-no-cudagraphs", 0.25)["backend"]("graph", []) == "graph"
    assert [budget for budget, _ in budgets] == [0.5, 0.25]
    assert budgets[0][1] == {}
    assert budgets[1][1] == torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    assert torch._functorch.config.activation_memory_budget == before
    assert compiling._options("reduce-overhead", None) == {"mode": "reduce-overhead"}


@of_torch_by_its_own_compiler
@pytest.mark.parametrize("setting", [True, "blocks"])
def test_compiled_code_saves_what_cheap_saves(monkeypatch, setting):
    """The partitioned forward returns results of products for backward, and not those of activations and norms."""
    from functorch.compile import min_cut_rematerialization_partition, nop
    from torch._dynamo.backends.common import aot_autograd

    saved = []

    def forward_compiler(graph, inputs):
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        saved.extend(str(node.target) for node in output.args[0] if node is not None and node.op == "call_function")
        return nop(graph, inputs)

    backend = aot_autograd(
        fw_compiler=forward_compiler, bw_compiler=nop, partition_fn=min_cut_rematerialization_partition
    )
    monkeypatch.setattr(compiling, "_options", lambda mode, budget: {"backend": backend})
    torch._dynamo.reset()
    model = Deep(3)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", compile=setting, recompute="cheap")
    with engine.forward():
        loss = model(torch.randn(2, 8)).sum()
    engine.backward(loss)
    engine.close()
    torch._dynamo.reset()
    assert any("addmm" in name for name in saved)
    assert not [name for name in saved if "gelu" in name or "layer_norm" in name or "erf" in name or "rsqrt" in name]
