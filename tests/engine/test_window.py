"""Weights of micro-batches: the update is their weighted mean, and no weight makes a scaled loss larger than the loss scale."""

import contextlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_sync import no_synchronisation
from halfstep.engine.engine import Engine
from halfstep.engine.window import Window
from halfstep.errors import SettingError

SLOPES = torch.tensor([0.75, -1.5, 2.0, 0.125])


class Slope(nn.Module):
    """A model whose gradient is its input, so that the mean of a window is known exactly."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, slope):
        return (self.weight * slope).sum()


class NoReading(TorchDispatchMode):
    """Forbids to read a value back from the device."""

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host read a device value"
        return func(*args, **(kwargs or {}))


def build(precision="fp32", **options):
    """A model and an Engine whose update is the gradient itself."""
    model = Slope()
    return model, Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), precision, **options)


def train_window(model, engine, weights, slopes=None, unscale=False):
    """One window of micro-batches with these weights; its result and the update."""
    before = model.weight.detach().clone()
    for i, weight in enumerate(weights):
        with engine.forward():
            loss = model(SLOPES * (i + 1) if slopes is None else slopes[i])
        engine.backward(loss, weight)
        if unscale and i == len(weights) - 1:
            engine.unscale()
        result = engine.step(last=i == len(weights) - 1)
    return result, before - model.weight.detach()


def weighted_mean(weights, slopes):
    """The update in float64; a weight of None is 1."""
    numbers = [1.0 if w is None else float(w) for w in weights]
    return sum(w * s.double() for w, s in zip(numbers, slopes, strict=True)) / sum(numbers)


powers = st.integers(-100, 100).map(lambda e: 2.0**e)
ordinary = st.integers(0, 5000) | st.floats(0.015625, 4000, width=32)
any_weight = st.none() | st.just(0) | ordinary | st.builds(lambda p, f: p * f, powers, st.floats(1, 2, width=32))
as_passed = st.builds(lambda w, device: w if w is None or not device else torch.tensor(w), any_weight, st.booleans())


@settings(max_examples=40, deadline=None)
@given(
    windows=st.lists(st.lists(as_passed, min_size=1, max_size=5), min_size=1, max_size=4),
    unscale=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_update_is_the_weighted_mean(windows, unscale, seed):
    """Any weights, numbers or tensors or both, in any order and windows of any length, compared with float64."""
    model, engine = build(accumulate=5)
    generator = torch.Generator().manual_seed(seed)
    for weights in windows:
        slopes = list(torch.randn(len(weights), 4, generator=generator))
        result, update = train_window(model, engine, weights, slopes, unscale)
        if all(w is not None and float(w) == 0 for w in weights):
            assert result.skipped
            assert not update.any()
            continue
        assert not result.skipped
        expected = weighted_mean(weights, slopes)
        assert result.grad_norm == pytest.approx(float(expected.norm()), rel=1e-4, abs=1e-5)
        assert torch.allclose(update.double(), expected, rtol=1e-4, atol=2e-5)


@settings(max_examples=60, deadline=None)
@given(windows=st.lists(st.lists(as_passed, min_size=1, max_size=5), min_size=1, max_size=4))
def test_a_factor_never_exceeds_one(windows):
    """So fp16 sees at most the loss scale; what was accumulated is corrected by a power of two, downwards only."""
    window = Window(5)
    for weights in windows:
        for weight in weights:
            correction = float(window.weigh(weight))
            window.end_micro_batch()
            assert 0 <= float(window.factor) <= 1
            assert correction == 0 or (correction <= 1 and math.frexp(correction)[0] == 0.5)
        window.open()


@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("weights", [(1, 4096), (0, 4096), (0.001, 1, 1000), (4096, 1)], ids=str)
def test_fp16_survives_weights_of_any_order(weights, as_tensor):
    """At a loss scale of 32768 a factor of 4 would overflow: a small weight before a large one must not cause that."""
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(4))
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16,loss_scale=32768", accumulate=len(weights)
    )
    for weight in weights:
        with engine.forward():
            loss = model(torch.full((1, 4), 0.5)).float().mean()
        engine.backward(loss, torch.tensor(float(weight)) if as_tensor else weight)
        result = engine.step()
    assert not result.skipped
    assert result.grad_norm == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "fp16,loss_scale=32768"])
@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, -3.0])
@pytest.mark.parametrize("place", [0, 1])
def test_a_broken_tensor_weight_affects_only_its_own_window(precision, weight, place):
    """NaN, inf and negative weights skip their step; the window after it and the saved state are healthy."""
    model, engine = build(precision, accumulate=2)
    weights = [torch.tensor(5.0), torch.tensor(5.0)]
    weights[place] = torch.tensor(weight)
    result, update = train_window(model, engine, weights)
    assert result.skipped
    assert not update.any()
    assert engine.state_dict()["counters"]["largest_weight"] in {8.0, 2.0**-126}
    for later in ([torch.tensor(5.0), 3], [None, None]):
        result, update = train_window(model, engine, later)
        assert not result.skipped
        assert torch.allclose(update.double(), weighted_mean(later, [SLOPES, SLOPES * 2]), rtol=1e-3)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 0.0, -1.0])
def test_a_poisoned_checkpoint_is_healed(poison):
    """A state whose reference is unusable loads and trains."""
    model, engine = build()
    state = engine.state_dict()
    state["counters"]["largest_weight"] = poison
    engine.load_state_dict(state)
    result, update = train_window(model, engine, [torch.tensor(3.0)])
    assert not result.skipped
    assert torch.equal(update, SLOPES)


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0.0), torch.tensor(0)], ids=["int", "float", "tensor", "count"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_window_without_weight_is_skipped_and_is_no_overflow(precision, zero):
    """Nothing to average: the weights, the loss scale and its counters stay, however often that happens."""
    model, engine = build(precision, accumulate=2)
    before = engine.scaler.state_dict()
    for _ in range(101):  # more than the skips in a row that stop a run
        result, update = train_window(model, engine, [zero, zero])
        assert result.skipped
        assert not update.any()
    assert engine.scaler.state_dict() == before
    assert (engine.progress.attempts, engine.progress.applied) == (101, 0)
    result, update = train_window(model, engine, [zero, 7])
    assert not result.skipped
    assert torch.allclose(update, SLOPES * 2, rtol=1e-3)


def test_unscaled_gradients_of_a_window_without_weight_are_zero():
    """People who edit gradients after unscale() find zeros, not NaN."""
    model, engine = build()
    with engine.forward():
        loss = model(SLOPES)
    engine.backward(loss, 0)
    engine.unscale()
    assert model.weight.grad.tolist() == [0.0] * 4
    assert engine.step().skipped


def test_a_weight_far_above_all_others_is_forgotten():
    """After one weight of 2^100 ordinary windows have their full precision and their norm."""
    model, engine = build()
    for outlier in (2.0**100, torch.tensor(2.0**100)):
        train_window(model, engine, [outlier])
        result, update = train_window(model, engine, [1])
        assert torch.equal(update, SLOPES)
        assert result.grad_norm == pytest.approx(float(SLOPES.norm()), rel=1e-6)


def test_ordinary_windows_change_no_accumulated_gradient():
    """Without weights, and with weights below the last window's, nothing is multiplied."""
    window = Window(3)
    for weights in ([None] * 3, [900, 500, 800], [600, 1000, 520]):
        corrections = [window.weigh(w) for w in weights if window.end_micro_batch() or True]
        assert corrections[1:] == [1.0, 1.0]
        window.open()


def test_tensor_weights_are_not_read_by_the_host():
    """Growing references, broken weights and empty windows are handled on the device."""
    model, engine = build(accumulate=4)
    for i, weight in enumerate((0.0, 3.0, 5000.0, math.nan)):
        with engine.forward():
            loss = model(SLOPES)
        on_device = torch.tensor(weight)
        with NoReading():
            engine.backward(loss, on_device)
        engine.step(last=i == 3)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16,loss_scale=32768"])
def test_tensor_weights_on_a_gpu_do_not_synchronise(precision):
    """torch reports no synchronising call, and the update is the weighted mean."""
    model = Slope().cuda()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), precision, accumulate=3)
    weights, slope = [torch.tensor(w, device="cuda") for w in (0.0, 3.0, 5000.0)], SLOPES.cuda()
    for step in range(3):
        with no_synchronisation() if step else contextlib.nullcontext():
            for weight in weights:
                with engine.forward():
                    loss = model(slope)
                engine.backward(loss, weight)
                result = engine.step()
    assert not result.skipped
    assert torch.allclose(model.weight.detach().cpu(), -3 * SLOPES, rtol=1e-3)


@pytest.mark.parametrize(
    "weight",
    [True, False, "4", math.nan, math.inf, -1, -0.5, 1e300, 1e-300, 10**400, 2j, torch.ones(2), torch.tensor(True), torch.tensor(2j)],
    ids=str,
)  # fmt: skip
def test_what_is_no_weight_is_rejected(weight):
    """Booleans, text, complex numbers, vectors, and numbers that fp32 cannot represent."""
    with pytest.raises(SettingError, match="weight"):
        Window(1).weigh(weight)


@pytest.mark.parametrize(
    "weight", [3, 3.0, np.float32(3), np.int64(3), torch.tensor(3), torch.tensor([3.0]), torch.tensor(3.0).bfloat16()]
)
def test_every_kind_of_number_is_a_weight(weight):
    """Python's and NumPy's numbers, and tensors of any real dtype with one element."""
    model, engine = build(accumulate=2)
    _, update = train_window(model, engine, [weight, 1])
    assert torch.allclose(update, SLOPES * 1.25)


def test_a_second_loss_has_the_factor_of_the_first():
    """Nothing is added to the window, and nothing accumulated is multiplied."""
    window = Window(2)
    window.weigh(4)
    assert (window.weigh(None), window.factor, window.weight) == (1.0, 1.0, 1.0)
    with pytest.raises(SettingError, match=r"weight=5\) for another loss"):
        window.weigh(5)
