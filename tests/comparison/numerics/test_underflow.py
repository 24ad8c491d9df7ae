"""Underflow: what is zero as stored and not in fp32."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from halfstep.comparison.measurements import SkipCause
from halfstep.comparison.numerics.underflow import judge_sample, num_underflows, take_sample, where_not_zero
from halfstep.watching.activations import Activations

TINY = 2.0**-25  # and below rounds to zero in fp16


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def compute(net):
    return net(torch.tensor([0, 1, 2])).float().sum()


def named_gradients(**values):
    """Parameters with these gradients, by name; a dot is written as two underscores."""
    named = []
    for name, grad in values.items():
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad
        named.append((name.replace("__", "."), param))
    return named


def test_the_reference_leaves_the_model_as_it_is():
    """Weights, buffers, gradients and dtypes of a 16-bit model are untouched by computing its gradients in fp32."""
    net = model().to(torch.float16)
    before = copy.deepcopy(net.state_dict())
    not_zero = where_not_zero(net, compute)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert {p.dtype for p in net.parameters()} == {torch.float16}
    assert all(p.grad is None for p in net.parameters())
    assert not_zero.keys() == dict(net.named_parameters()).keys()


def test_zeros_of_the_model_itself_do_not_count():
    """Rows of an embedding that the batch does not use are zero in fp32 too, so nothing has underflowed."""
    net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1))
    not_zero = where_not_zero(net, compute)
    compute(net).backward()
    counts = num_underflows(list(net.named_parameters()), not_zero)
    assert counts == {"0": (0, 12), "1": (0, 5)}


@given(
    exponents=st.lists(st.integers(-40, -10), min_size=1, max_size=40),
    scale=st.sampled_from([1.0, 2.0**8, 2.0**16]),
    num_zeros=st.integers(0, 5),
)
def test_what_the_scale_saves_has_not_underflowed(exponents, scale, num_zeros):
    """The count is that of the elements whose scaled value rounds to zero in fp16, whatever the scale."""
    true = torch.tensor([1.5 * 2.0**e for e in exponents] + [0.0] * num_zeros)
    named = named_gradients(layer__weight=(true * scale).half())
    counts = num_underflows(named, {"layer.weight": true != 0})
    expected = sum(1.5 * 2.0**e * scale < TINY for e in exponents)
    assert counts == {"layer": (expected, len(exponents))}


def test_the_worst_layer_has_the_largest_share():
    """Not the largest number: a small layer that has lost half of its gradient is worse than a large one that has lost a tenth."""
    large, small = torch.ones(100), torch.ones(4)
    large[:10], small[:2] = 0, 0
    named = named_gradients(large__weight=large, small__weight=small, whole__weight=torch.ones(3))
    counts = num_underflows(named, {name: torch.ones_like(p, dtype=torch.bool) for name, p in named})
    numerics = judge_sample(take_sample(7, named, 4.0, None), counts)
    assert numerics.underflow == pytest.approx(12 / 107)
    assert (numerics.worst_layer, numerics.worst_underflow) == ("small", 0.5)
    assert (numerics.step, numerics.scale, numerics.overflowed) == (7, 4.0, None)


def test_without_underflow_there_is_no_worst_layer():
    """A share of 0 is measured, None is not."""
    named = named_gradients(w=torch.ones(3))
    sample = take_sample(1, named, 1.0, None)
    clean = judge_sample(sample, num_underflows(named, {"w": torch.ones(3, dtype=torch.bool)}))
    assert (clean.underflow, clean.worst_layer) == (0.0, None)
    assert judge_sample(sample, None).underflow is None


def test_an_overflow_hides_the_underflow_and_is_where_it_began():
    """The examined cause is used first, then the first output that is not finite, then the last gradient."""
    bad = torch.tensor([1.0, float("inf")])
    named = named_gradients(first__weight=bad, second__weight=bad.clone())
    counts = {"first": (1, 2)}
    plain = judge_sample(take_sample(1, named, 1.0, None), counts)
    assert (plain.underflow, plain.worst_layer, plain.overflowed) == (None, "second", "gradient")
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    activations = Activations(net)
    activations.arm()
    net(torch.tensor([[float("inf"), 1.0]]))
    seen = judge_sample(take_sample(1, named, 1.0, activations.take()), counts)
    assert (seen.worst_layer, seen.overflowed) == ("0", "output")
    for module, place in (("blocks.3", "blocks.3"), ("", "model"), (None, "loss")):
        known = judge_sample(take_sample(1, named, 1.0, None), counts, SkipCause(1, "forward", module, "x", 1.0))
        assert (known.worst_layer, known.overflowed) == (place, "forward")


def test_an_output_of_minus_infinity_is_no_overflow():
    """A mask with -inf in it is normal as long as the gradients are finite."""
    named = named_gradients(layer__weight=torch.tensor([1.0, 0.0]))
    net = nn.Sequential(nn.LeakyReLU())
    activations = Activations(net)
    activations.arm()
    assert net(torch.tensor([[-float("inf"), 1.0]])).isinf().any()
    counts = num_underflows(named, {"layer.weight": torch.tensor([True, True])})
    numerics = judge_sample(take_sample(1, named, 1.0, activations.take()), counts)
    assert (numerics.underflow, numerics.overflowed) == (0.5, None)


def test_a_sample_counts_unscaled_gradients():
    """The exponents are those of the gradient divided by the loss scale."""
    named = named_gradients(w=torch.tensor([2.0**10, 2.0**11, 0.0]))
    stats = take_sample(1, named, 1024.0, None).gradients["w"]
    assert (stats.smallest, stats.largest, stats.zeros) == (1.0, 2.0, 1)
