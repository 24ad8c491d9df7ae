"""Activations: outputs of leaf modules, counted once, whatever the forward does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine_models import batches, build, train_step
from halfstep.kernels.exponents import BIN_OF_1
from halfstep.watching import activations as module
from halfstep.watching.activations import Activations
from halfstep.watching.sample import Header
from halfstep.watching.watch import Watch


def count(model, *inputs, hooks=None):
    """The statistics of one training forward and backward."""
    hooks = hooks or Activations(model)
    hooks.arm()
    for x in inputs:
        model(x).sum().backward()
    table = hooks.take()
    assert not any(m._forward_hooks for m in model.modules())
    return {} if table is None else Header(table.names, table.numels, table.dtypes).rows(table.table.numpy()).by_name()


def bins(stats):
    """Counts by exponent."""
    return {i - BIN_OF_1: n for i, n in enumerate(stats.bins) if n}


def test_outputs_of_leaves_are_counted_exactly():
    """Powers of two that are known in advance, zeros included."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
    stats = count(model, torch.tensor([[4.0, 0.25], [8.0, 0.5]]))
    assert bins(stats["0"]) == {2: 1, 3: 1, -2: 1, -1: 1}
    assert bins(stats["1"]) == {2: 1, 3: 1}
    assert stats["1"].zeros == 2


def test_dropout_is_not_counted():
    """Its output is its input with zeros; subclasses are left out too."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.ReLU())
    assert set(count(model, torch.ones(3, 2))) == {"0", "3"}


def test_a_second_sample_of_other_shapes_is_counted_exactly():
    """What is kept from sample to sample follows the shapes."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    hooks = Activations(model)
    for rows in (4, 4, 7):
        stats = count(model, torch.randn(rows, 2), hooks=hooks)
        assert [stats[name].numel for name in ("0", "1")] == [3 * rows, 3 * rows]
        assert sum(stats["0"].bins) + stats["0"].zeros == 3 * rows


@pytest.mark.parametrize("limit", [1, 100, 10**9])
def test_micro_batches_and_shared_modules_add_up(monkeypatch, limit):
    """Several calls of a module are one row: counts are summed and extremes combined, however they were grouped."""
    monkeypatch.setattr(module, "_WAITING_BYTES", limit)
    shared = nn.Tanh()
    model = nn.Sequential(nn.Linear(3, 3), shared, nn.Linear(3, 3), shared)
    torch.manual_seed(0)
    xs = [torch.randn(4, 3), 100 * torch.randn(2, 3)]
    outputs = []
    handle = shared.register_forward_hook(lambda m, a, out: outputs.append(out.detach()))
    for x in xs:
        model(x)
    handle.remove()
    stats = count(model, *xs)
    everything = torch.cat([o.flatten() for o in outputs])
    assert set(stats) == {"0", "1", "2"}
    assert stats["1"].numel == everything.numel() == 36
    assert stats["1"].largest == everything.abs().max()
    assert stats["1"].smallest == everything.abs().min()


def test_an_output_that_is_changed_in_place_is_counted_before_the_change():
    """An inplace ReLU after a layer: its input is missing in the first sample and right from the second on."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(inplace=True))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
    hooks, x = Activations(model), torch.tensor([[4.0, 0.25]])
    first = count(model, x, hooks=hooks)
    second = count(model, x, hooks=hooks)
    assert "0" not in first
    assert bins(second["0"]) == {2: 1, -2: 1}
    assert bins(first["1"]) == bins(second["1"]) == {2: 1}


def test_a_model_without_children_is_one_module():
    """A bare layer is watched under the name "model"."""
    assert count(nn.Linear(2, 3), torch.ones(1, 2)).keys() == {"model"}


def test_validation_and_recomputation_are_not_counted():
    """Forwards without gradients, and those inside backward, do not count."""

    class Rerun(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Rerun()
    hooks = Activations(model)
    hooks.arm()
    with torch.no_grad():
        model(torch.ones(7, 3))
    model(torch.ones(2, 3)).sum().backward()
    table = hooks.take()
    assert table.numels == (6,)


def test_modules_that_return_their_input_and_odd_outputs_pass():
    """Identity is not counted twice; tuples, integers and None are looked through."""

    class Odd(nn.Module):
        def forward(self, x):
            return {"a": (x * 2, None), "b": torch.arange(3)}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.same, self.odd, self.lstm = nn.Identity(), Odd(), nn.LSTM(2, 2)

        def forward(self, x):
            out, _ = self.lstm(self.odd(self.same(x))["a"][0])
            return out

    stats = count(Model(), torch.ones(1, 1, 2, requires_grad=True))
    assert set(stats) == {"odd", "lstm"}
    assert stats["lstm"].numel == 6  # output, hidden and cell state


@pytest.mark.parametrize("way", ["compile()", "torch.compile"])
def test_a_compiled_model_is_reported(way):
    """Hooks inside a compiled model would be traced or ignored: there are none, and one event reports it."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    if way == "compile()":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch(model, every=1, activations=True).attach(optimizer)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    watch.close()
    (event,) = watch.events
    assert event.kind == "no-activations"
    assert "2 of 2 modules are compiled" in event.message
    assert all(not s.activations and s.gradients for s in watch.samples)


def test_hooks_that_never_run_are_reported():
    """The original module of a wrapper made by torch.compile is watched: its hooks are traced and do nothing."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch(model, every=1, activations=True).attach(optimizer)
    for _ in range(2):
        compiled(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    watch.close()
    (event,) = watch.events
    assert "No forward hook ran" in event.message


@pytest.mark.parametrize("options", [{}, {"recompute": "cheap"}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("precision", ["fp16", "bf16-lean"])
def test_an_engines_activations_are_those_of_its_forwards(precision, options):
    """Every leaf once per micro-batch, in the dtype it computes in, with recomputed blocks counted once."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3))
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return self.head(F.gelu(x))

    watch = Watch(every=1, activations=True)
    model, _, engine = build(precision, model=Net(), watch=watch, schedule=False, **options)
    num = options.get("accumulate", 1)
    for batch in batches(2 * num):
        train_step(model, engine, batch)
    with engine.evaluate():
        model(batches(1)[0][0])
    engine.close()
    names = {f"blocks.{i}.{j}" for i in range(3) for j in range(2)} | {"head"}
    for sample in watch.samples:
        assert sample.activations.keys() == names
        assert sample.activations["head"].numel == 8 * 3 * num
        assert set(sample.activation_rows.dtypes) == {"fp16" if precision == "fp16" else "bf16"}
