"""Products, sums and concatenations of 16-bit activations with a lean model's fp32 buffers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import halfstep
from halfstep.engine.region import compute_region, tables
from halfstep.engine.region.tables import recognise_tables
from halfstep.precision.formats import COMPUTE_DTYPES

every_compute = pytest.mark.parametrize("compute", ["bf16", "fp16"])
FP32 = torch.float32


def activation(compute):
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).to(COMPUTE_DTYPES[compute])


@every_compute
@pytest.mark.parametrize("swap", [False, True])
def test_products_and_sums_with_a_table_have_the_activations_dtype(compute, swap):
    """The result is that of the rounded table, in either order, also with a view; the table stays as it is."""
    x, table = activation(compute), torch.linspace(-3, 3, 80).view(10, 8)
    rows = table[2:7]
    with recognise_tables([table]), compute_region("cpu", compute, lean=True):
        product, total = (rows * x, rows + x) if swap else (x * rows, x + rows)
    assert torch.equal(product, x * rows.to(x.dtype))
    assert torch.equal(total, x + rows.to(x.dtype))
    assert table.dtype is FP32


@every_compute
def test_gradients_have_the_activations_dtype(compute):
    """The gradient of a product is the incoming one times the rounded table; that of a sum is the incoming one."""
    x, table = activation(compute).requires_grad_(), torch.linspace(-3, 3, 8)[None]
    grad = activation(compute) + 1
    with recognise_tables([table]), compute_region("cpu", compute, lean=True):
        y = x * table + table
    y.backward(grad)
    assert x.grad.dtype is x.dtype
    assert torch.equal(x.grad, grad * table.to(x.dtype))


@pytest.mark.parametrize("number", [2, 2.5, True])
@pytest.mark.parametrize("dtype", [torch.int64, FP32, torch.bfloat16])
def test_products_and_sums_with_numbers_are_torchs_own(number, dtype):
    """A Python number on either side promotes as it does without the block."""
    x = torch.arange(4).to(dtype)
    expected = [x + number, number * x, torch.add(x, number, alpha=1 if number is True else 2)]
    with recognise_tables([torch.ones(4)]), compute_region("cpu", "bf16", lean=True):
        results = [x + number, number * x, torch.add(x, number, alpha=1 if number is True else 2)]
    for result, other in zip(results, expected, strict=True):
        assert result.dtype is other.dtype
        assert torch.equal(result, other)


def test_a_product_can_be_differentiated_twice():
    """Gradient penalties see the table as a constant factor."""
    x, table = activation("bf16").requires_grad_(), torch.linspace(-3, 3, 8)[None]
    with recognise_tables([table]), compute_region("cpu", "bf16", lean=True):
        y = (x * table) ** 2
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.float().sum(), x)
    assert torch.allclose(second.float(), (2 * table**2).expand(x.shape), rtol=0.02, atol=0.02)


@every_compute
def test_other_promotions_are_torchs_own(compute):
    """fp32 tensors that are no buffers, wider tables, other regions and what follows the block promote as usual."""
    x, table = activation(compute), torch.linspace(-3, 3, 8)[None]
    with recognise_tables([table]):
        with compute_region("cpu", compute, lean=True):
            assert (x * table.clone()).dtype is FP32
            assert (x[:1, :1] * table.expand(3, 4, 8)).dtype is FP32
            assert (x * table[0, 0]).dtype is x.dtype  # torch does not promote to the dtype of a single number
        with compute_region("cpu", compute):
            assert (x * table).dtype is FP32
        with torch.autocast("cpu", COMPUTE_DTYPES[compute]):
            assert (x + table).dtype is FP32
        assert (x + table).dtype is FP32
    with compute_region("cpu", compute, lean=True):
        assert (x * table).dtype is FP32


@every_compute
def test_a_concatenation_with_a_buffer_has_the_activations_dtype(compute):
    """Also with a vector, as in timm's biases of queries, keys and values; gradients have the parameters' dtype."""
    table, zeros = torch.ones(2, 3, 8), torch.zeros(8)
    x, bias = activation(compute).requires_grad_(), activation(compute)[0, 0].requires_grad_()
    with recognise_tables([table, zeros]), compute_region("cpu", compute, lean=True):
        both, biases = torch.cat((x, table), dim=1), torch.cat((bias, zeros, bias))
    assert torch.equal(both, torch.cat((x, table.to(x.dtype)), dim=1))
    assert torch.equal(biases, torch.cat((bias, zeros.to(x.dtype), bias)))
    (both.sum() + biases.sum()).backward()
    assert x.grad.dtype is bias.grad.dtype is x.dtype
    assert torch.equal(bias.grad, torch.full_like(bias, 2))


@every_compute
def test_other_concatenations_are_torchs_own(compute):
    """Without buffers, with those of models without tables, with integers and outside of lean regions."""
    x, table, vector = activation(compute), torch.ones(2, 3, 8), torch.zeros(8)
    with recognise_tables([table]):
        with compute_region("cpu", compute, lean=True):
            assert torch.cat((x, x)).dtype is x.dtype
            assert torch.cat((x, table.clone()), dim=1).dtype is FP32
            assert torch.cat((table, table)).dtype is FP32
            assert torch.cat([torch.arange(3), torch.arange(2)]).dtype is torch.int64
            assert torch.equal(torch.cat((x, x[:, :0]), -2), x)
        for block in (compute_region("cpu", compute), torch.autocast("cpu", COMPUTE_DTYPES[compute])):
            with block:
                assert torch.cat((x, table), dim=1).dtype is FP32
    with recognise_tables([vector]), compute_region("cpu", compute, lean=True):
        assert torch.cat((x[0, 0], vector)).dtype is FP32


class Positions(nn.Module):
    """A layer as in torch's own tutorial: fp32 positions added to what an embedding gives."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.register_buffer("positions", torch.linspace(-1, 1, 96).view(12, 8))

    def forward(self, x):
        self.stream = self.embedding(x) + self.positions[: x.shape[1]]
        return self.linear(self.stream)


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean"])
def test_an_engines_model_has_a_16_bit_stream_and_its_buffers_stay_fp32(precision):
    """Two engines do not disturb each other, and after close() torch promotes again."""
    models = [Positions(), Positions()]
    engines = [halfstep.Engine(m, torch.optim.SGD(m.parameters(), lr=0.1), precision=precision) for m in models]
    ids = torch.arange(5)[None]
    for model, engine in zip(models, engines, strict=True):
        with engine.forward():
            loss = model(ids).float().square().mean()
        assert model.stream.dtype in (torch.bfloat16, torch.float16)
        assert model.positions.dtype is FP32
        engine.backward(loss)
        engine.step()
        engine.close()
        with compute_region("cpu", precision.partition("-")[0], lean=True):
            assert (model.embedding(ids) + model.positions[:5]).dtype is FP32


def test_what_meets_a_table_is_counted():
    """The truth table can show it."""
    observed, table = Counter(), torch.ones(1, 8)
    with recognise_tables([table]), compute_region("cpu", "bf16", lean=True, observed=observed):
        activation("bf16") * table
    assert observed == {"mul with an fp32 buffer": 1}


@pytest.mark.parametrize("lean", [False, True])
def test_numbers_are_no_tables(lean):
    """With a table registered, sums and products with Python numbers are torch's own, for integers and with `alpha` too."""
    x, count, table = activation("bf16").requires_grad_(), torch.arange(4), torch.linspace(-3, 3, 8)[None]
    with recognise_tables([table]), compute_region("cpu", "bf16", lean=lean):
        results = [x + 1e-6, 2 * x, x.add(3, alpha=2), x * True, count + 0, count * 1.5, x.float() + 0.5]
    expected = [x + 1e-6, 2 * x, x.add(3, alpha=2), x * True, count + 0, count * 1.5, x.float() + 0.5]
    for result, plain in zip(results, expected, strict=True):
        assert result.dtype is plain.dtype
        assert torch.equal(result, plain)
    results[1].sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_vectors_are_not_tables():
    """A vector of frequencies, which every rotary embedding of transformers has, costs nothing and promotes."""
    vector = torch.ones(8)
    with recognise_tables([vector]), compute_region("cpu", "bf16", lean=True):
        assert (activation("bf16") * vector).dtype is FP32
        assert not tables._libraries


def test_a_table_is_rounded_once_in_a_region_and_again_after_a_change():
    """Layers share the rounded copy that autograd saves; what is written into the table is seen, also in the same region."""
    table, saved = torch.ones(1, 8), []
    x = activation("bf16").requires_grad_()
    with recognise_tables([table]):
        for _ in range(2):
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
            with compute_region("cpu", "bf16", lean=True), hooks:
                assert torch.equal(x * table, x * table[:, :])
                table.add_(1)
                assert torch.equal(x * table, x * table.bfloat16())
    addresses = [t.data_ptr() for t in saved]  # of tensors that still exist, so that none is used again
    assert sorted(map(addresses.count, set(addresses))) == [1, 1, 1, 1, 2, 2]


@every_compute
def test_what_numbers_make_of_a_table_is_rounded_too(compute):
    """A mask as old attention layers write it, `x * b + -1e9 * (1 - b)`, leaves the scores in 16 bits, and finite."""
    x, mask = activation(compute), torch.ones(5, 8).tril()[None]
    with recognise_tables([mask]), compute_region("cpu", compute, lean=True):
        scores = x * mask + -1e9 * (1 - mask)
        other = (mask - 1) * 2 + x
        kept = x * (1 - mask.clone())
    assert scores.dtype is other.dtype is x.dtype
    assert kept.dtype is FP32
    assert scores.isfinite().all()
    expected = (x.float() * mask - 1e9 * (1 - mask)).softmax(-1)
    assert torch.allclose(scores.float().softmax(-1), expected, atol=1e-3)


def test_a_table_made_outside_a_lean_region_is_torchs_own():
    """In autocast presets and after the block nothing is rounded."""
    x, mask = activation("bf16"), torch.ones(5, 8).tril()[None]
    with recognise_tables([mask]), compute_region("cpu", "bf16"):
        assert (x + (1 - mask)).dtype is FP32
    assert (x + (1 - mask)).dtype is FP32


def test_tables_are_forgotten_after_the_names_of_the_module(monkeypatch):
    """At the end of a process an Engine that nobody closed may be collected when the module's globals are None already."""
    table = torch.ones(4, 4)
    block = recognise_tables([table])
    block.__enter__()
    storages = tables._storages
    for name in ("_remove", "_storages", "_vectors", "_libraries", "sys"):
        monkeypatch.setattr(tables, name, None)
    block.__exit__(None, None, None)
    assert not storages
