"""Output layers of widths that are not multiples of eight: the same products, as nn.Linear gives them."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad

from halfstep import Engine
from halfstep.engine.region import aligned
from halfstep.precision.policy import Policy


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    """Every product is large enough."""
    monkeypatch.setattr(aligned, "LARGE", 1)


@pytest.fixture
def on_cpu():
    """CPU tensors are treated as CUDA tensors."""
    with aligned.on_every_device():
        yield


class Model(nn.Module):
    """An embedding, a hidden layer and a head of an odd width."""

    def __init__(self, width=29, *, bias=True, tied=False):
        super().__init__()
        self.embed = nn.Embedding(width, 16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, width, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.hidden(self.embed(tokens))))


def calls(monkeypatch):
    """A list that grows by one for each aligned product."""
    seen, apply = [], aligned.AlignedLinear.apply
    monkeypatch.setattr(aligned.AlignedLinear, "apply", lambda *args: seen.append(1) or apply(*args))
    return seen


def train(precision, *, steps=3, model=None, **options):
    torch.manual_seed(0)
    model = Model(**options) if model is None else model
    tokens = torch.randint(0, 29, (4, 8))
    losses = []
    with Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision) as engine:
        for _ in range(steps):
            with engine.forward():
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        rows = dict(engine.truth().rows)
    return losses, rows


@settings(max_examples=60)
@given(
    width=st.integers(1, 40),
    lead=st.sampled_from([(), (5,), (2, 3), (2, 1, 4), (0,)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    weights=st.sampled_from([torch.float32, None]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_result_and_gradients_are_those_of_the_plain_layer(width, lead, dtype, weights, bias, seed):
    """Against float64: as near as 16-bit operands allow, in the layer's shapes and dtypes, contiguous."""
    g = torch.Generator().manual_seed(seed)
    weights = weights or dtype
    x = torch.randn(*lead, 8, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(width, 8, generator=g).to(dtype).to(weights).requires_grad_()
    offset = torch.randn(width, generator=g).to(dtype).to(weights).requires_grad_() if bias else None
    inputs = [t for t in (x, weight, offset) if t is not None]
    y = aligned.AlignedLinear.apply(x, weight, offset)
    grad = torch.randn(y.shape, generator=g).to(dtype)
    gradients = torch.autograd.grad(y, inputs, grad)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = F.linear(*exact)
    expected_gradients = torch.autograd.grad(expected, exact, grad.double())
    assert y.is_contiguous()
    assert y.dtype is dtype
    epsilon = torch.finfo(dtype).eps
    for ours, theirs, of in [(y, expected, x), *zip(gradients, expected_gradients, inputs, strict=True)]:
        assert ours.shape == theirs.shape
        assert ours.dtype is of.dtype
        scale = theirs.abs().max().item() if theirs.numel() else 0.0
        # Some CPUs round the product before they add the bias, which may be larger than the sum.
        assert torch.allclose(ours.double(), theirs, rtol=2 * epsilon, atol=2 * epsilon * (scale + 4))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-lean", "fp16-lean"])
@pytest.mark.parametrize("options", [{}, {"bias": False, "tied": True}], ids=["bias", "tied"])
def test_training_is_that_of_the_plain_layer(precision, options, monkeypatch):
    """Losses to 16-bit rounding, with biases and with a head that shares the embedding's weight."""
    plain, rows = train(precision, **options)
    assert "aligned widths" not in rows
    seen = calls(monkeypatch)
    with aligned.on_every_device():
        ours, rows = train(precision, **options)
    assert len(seen) == 3
    assert ours == pytest.approx(plain, rel=2e-2)
    assert rows["aligned widths"] == "head 29 as 32"
    assert f"{precision.removesuffix('-lean')} in 2 of 2 matrix products" in rows["compute"]


def test_double_backward(on_cpu):
    """Gradients of gradients are those of the plain layer."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for product in (aligned.AlignedLinear.apply, F.linear):
        (gradient,) = torch.autograd.grad(product(x, weight, None).float().square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(gradient.float().square().sum(), weight)[0])
    assert torch.allclose(results[0].float(), results[1].float(), rtol=2e-2, atol=1.0)


@pytest.mark.parametrize("change", ["aligned", "fp32", "keep_fp32", "small weight", "small product", "own forward"])
def test_other_layers_run_as_they_are(change, monkeypatch, on_cpu):
    """No copies where nothing is gained, or where the layer is not plain."""
    seen, model = calls(monkeypatch), Model(32 if change == "aligned" else 29)
    policies = {"fp32": "fp32", "keep_fp32": "bf16-lean,keep_fp32=head"}
    if change.startswith("small"):
        products = 4 * 8 * 16 * 29
        monkeypatch.setattr(aligned, "LARGE", products + 1)
        monkeypatch.setattr(aligned, "MOST_ROWS", 1 if change == "small weight" else 2**16)
    if change == "own forward":
        model.head.forward = lambda x: F.linear(x, model.head.weight, model.head.bias)
    _, rows = train(policies.get(change, "bf16"), model=model)
    assert seen == []
    assert "aligned widths" not in rows


def test_inputs_of_an_odd_width_stay(monkeypatch, on_cpu):
    """A layer whose inputs are not aligned would need copies of them too."""
    seen, layer = calls(monkeypatch), nn.Linear(12, 29).bfloat16()
    with contextlib.ExitStack() as undo:
        aligned.align_outputs(layer, Policy.parse("bf16-lean"), undo)
        layer(torch.randn(3, 12).bfloat16())
    assert seen == []


def test_a_nested_block_leaves_the_outer_one(on_cpu):
    """Plans are made inside plans."""
    with aligned.on_every_device():
        pass
    _, rows = train("bf16")
    assert "aligned widths" in rows


def test_close_restores_the_forward(on_cpu):
    """After close() the layer is a plain one again."""
    model = Model()
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "bf16")
    assert "forward" in vars(model.head)
    engine.close()
    assert "forward" not in vars(model.head)


def test_copies_of_a_model_use_their_own_weights(on_cpu):
    """A deep copy and a pickled model compute with their weights, not with the original's."""
    model = Model()
    tokens = torch.arange(8).view(1, 8)
    with Engine(model, torch.optim.AdamW(model.parameters()), "bf16") as engine:
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        with torch.no_grad():
            model.head.weight.zero_()
            model.head.bias.zero_()
        with engine.forward():
            assert not model(tokens).any()
            assert all(twin(tokens).any() for twin in twins)


# torch's own forward-mode formulas load TorchScript, whose deprecation it announces.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_transforms_and_forward_mode_use_the_plain_product(monkeypatch, on_cpu):
    """torch.func and dual numbers, which the function has no rules for."""
    torch.manual_seed(0)
    seen, layer = calls(monkeypatch), nn.Linear(16, 29).bfloat16()
    undo = contextlib.ExitStack()
    aligned.align_outputs(layer, Policy.parse("bf16-lean"), undo)
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    with undo:
        batched = torch.func.vmap(layer)(x)
        gradient = torch.func.grad(lambda v: layer(v).float().sum())(x)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x))).tangent
        assert seen == []
        torch.testing.assert_close(batched, layer(x), rtol=2e-2, atol=2e-2)  # the bias is added to a rounded product
    assert gradient.shape == x.shape
    assert tangent.shape == (3, 29)
    assert len(seen) == 1


def test_inputs_that_the_plain_layer_rejects_are_rejected_by_it(on_cpu):
    """Outside a region, dtypes that do not match raise torch's own error."""
    layer = nn.Linear(16, 29).bfloat16()
    with contextlib.ExitStack() as undo:
        aligned.align_outputs(layer, Policy.parse("bf16-lean"), undo)
        with pytest.raises(RuntimeError, match="dtype"):
            layer(torch.randn(3, 16))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch by its own compiler, in some versions
def test_compiled_code_has_the_plain_product(monkeypatch, on_cpu):
    """The compiler pads by itself: a compiled layer is one graph without our function, an eager call of it has that."""
    torch.manual_seed(0)
    seen, layer = calls(monkeypatch), nn.Linear(16, 29).bfloat16()
    x = torch.randn(3, 16).bfloat16()
    with contextlib.ExitStack() as undo:
        aligned.align_outputs(layer, Policy.parse("bf16-lean"), undo)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), layer(x), rtol=2e-2, atol=2e-2)
    torch._dynamo.reset()
    assert len(seen) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_vocabulary_on_a_gpu(dtype):
    """GPT-2's 50257 classes: result and gradients are as near to fp32 as those of the plain layer."""
    torch.manual_seed(0)
    x = torch.randn(512, 256, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(50257, 256, device="cuda") / 16).to(dtype).requires_grad_()
    grad = torch.randn(512, 50257, device="cuda", dtype=dtype)
    results = {}
    for name, product in (("aligned", aligned.AlignedLinear.apply), ("plain", F.linear)):
        y = product(x, weight, None)
        results[name] = [y, *torch.autograd.grad(y, (x, weight), grad)]
    wide = [t.detach().float().requires_grad_() for t in (x, weight)]
    y = F.linear(*wide)
    exact = [y, *torch.autograd.grad(y, wide, grad.float())]
    for ours, plain, expected in zip(results["aligned"], results["plain"], exact, strict=True):
        error, usual = ((t.float() - expected).norm() for t in (ours, plain))
        assert error <= 1.1 * usual
