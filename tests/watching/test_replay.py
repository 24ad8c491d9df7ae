"""The autopsy of a skipped step: cause, module, and a training that continues as if nothing had happened."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.scaling.scaler import LossScaler
from halfstep.watching.probes import OverwrittenError, Probes
from halfstep.watching.replay import examine
from halfstep.watching.skips import Autopsies


class Net(nn.Module):
    """Dropout, batch norm, a layer that may be ruined, and random numbers of Python and NumPy."""

    def __init__(self, noisy=True):
        super().__init__()
        self.noisy = noisy
        self.inner, self.norm, self.drop, self.head = (
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.2),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        noise = random.random() + np.random.rand() if self.noisy else 0  # noqa: NPY002 - the global generators are tested
        return self.head(self.drop(F.gelu(self.norm(self.inner(x))))) + 0.01 * noise


class Overflowing(torch.autograd.Function):
    """The identity with a gradient that is multiplied."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return (gradient.float() * ctx.factor).to(gradient.dtype), None


def batches(num, accumulate=1):
    g = torch.Generator().manual_seed(3)
    return [
        [(torch.randn(8, 6, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(accumulate)]
        for _ in range(num)
    ]


def train(
    watch,
    ruin=None,
    *,
    precision="fp16",
    at=1,
    steps=3,
    accumulate=1,
    weights=None,
    between=None,
    noisy=True,
    lasting=False,
    **options,
):
    """Train for some steps with `ruin(model, x)` in one of them; returns everything that is left behind.

    A `lasting` fault is undone one step later.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = Net(noisy)
    scaler = LossScaler(init_scale=2.0**10) if precision.startswith("fp16") else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = Engine(
        model, optimizer, precision, ema=0.9, accumulate=accumulate, watch=watch, scaler=scaler, max_norm=1.0, **options
    )
    left, undo = [], None
    for step, window in enumerate(batches(steps, accumulate)):
        for micro, (x, y) in enumerate(window):
            if step == at and micro == accumulate - 1 and ruin is not None:
                undo = ruin(model, x)

            def compute(x=x, y=y):
                return F.cross_entropy(model(x), y)

            with engine.forward():
                loss = compute()
            engine.backward(loss, weight=None if weights is None else weights[step])
            left.append(loss.detach().clone())
            if between is not None:
                between(engine, step)
            result = engine.step(replay=compute)
        left.append((result.skipped, result.scale, result.grad_norm))
        if undo is not None and step == at + lasting:
            undo()
    state = engine.state_dict()
    state.pop("truth")  # compiled code from a cache is not observed
    left += [state, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002
    left += [{name: b.clone() for name, b in model.named_buffers()}]
    engine.close()
    return left


def same(one, other):
    """Whether two trees are bit for bit equal, NaN included."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other) if isinstance(one, float) else one == other  # NaN equals itself, -0.0 not 0.0


def bits(tensor):
    """The bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def test_the_comparison_of_runs_is_one_of_bits():
    """It distinguishes -0 from 0 and NaN from any number, and equates NaN with itself."""
    values = [0.0, -0.0, 1.0, 7.0, math.nan, math.inf]
    for i, a in enumerate(values):
        for j, b in enumerate(values):
            assert same({"x": [torch.tensor(a)]}, {"x": [torch.tensor(b)]}) == (i == j)
            assert same((a,), (b,)) == (i == j)
    assert not same(torch.zeros(2), torch.zeros(1, 2))
    assert not same(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


def nan_in_data(model, x):
    x[1, 2] = math.nan


def nan_in_weights(model, x):
    before = model.inner.weight.detach().clone()
    with torch.no_grad():
        model.inner.weight[0, 0] = math.nan
    return lambda: model.inner.weight.data.copy_(before)


def overflow_in_forward(model, x):
    return model.norm.register_forward_hook(lambda m, args, out: out * 3e38 * 3e38).remove


def overflow_in_backward(model, x):
    return model.inner.register_forward_hook(lambda m, args, out: Overflowing.apply(out, math.inf)).remove


def overflow_at_this_scale(model, x):
    return model.inner.register_forward_hook(lambda m, args, out: Overflowing.apply(out, 5e3)).remove


def once(model, x):
    fired = []

    def hook(module, args, out):
        fired.append(1)
        return out * math.inf if len(fired) == 1 else None

    return model.head.register_forward_hook(hook).remove


CASES = {
    nan_in_data: ("data", "inner"),
    nan_in_weights: ("weights", "inner"),
    overflow_in_forward: ("forward", "norm"),
    overflow_in_backward: ("backward", "inner"),
    once: ("not reproduced", None),
}


@pytest.mark.parametrize("precision", ["fp16", "bf16-lean"])
@pytest.mark.parametrize("ruin", CASES, ids=lambda f: f.__name__)
def test_cause_and_module_are_named_and_training_is_undisturbed(ruin, precision):
    """Each of the five causes; everything afterwards equals a run without an autopsy, bit for bit."""
    watch = Autopsies()
    left = train(watch, ruin, precision=precision)
    (autopsy,) = watch.autopsies
    assert (autopsy.cause, autopsy.module, autopsy.step) == (*CASES[ruin], 2)
    assert same(left, train(None, ruin, precision=precision))


def test_the_scale_is_blamed_where_it_is_to_blame():
    """Finite without loss scaling, and a scale that would fit."""
    watch = Autopsies()
    train(watch, overflow_at_this_scale)
    autopsy = watch.autopsies[0]
    assert (autopsy.cause, autopsy.module, autopsy.at_scale_1) == ("backward", "inner", True)
    assert autopsy.fitting_scale < autopsy.scale == 1024
    assert "loss scale 1024" in autopsy.sentence


def test_the_scale_is_not_blamed_for_a_gradient_that_is_not_finite_without_it():
    """The sentence reports that a lower scale would not help."""
    watch = Autopsies()
    train(watch, overflow_in_backward)
    assert watch.autopsies[0].at_scale_1 is False
    assert "is not to blame" in watch.autopsies[0].sentence


@pytest.mark.parametrize("custom", [False, True])
def test_the_gradients_at_scale_1_use_the_graph_again_unless_a_custom_function_is_in_it(custom):
    """A custom function may change what it saved, so there the forward is computed again."""
    torch.manual_seed(0)
    model, calls = nn.Linear(4, 1), []
    watch = Autopsies()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = Engine(model, optimizer, "fp16", watch=watch, scaler=LossScaler(init_scale=2.0**17))

    def compute():
        calls.append(1)
        result = model(torch.ones(2, 4))
        return (Overflowing.apply(result, 1.0) if custom else result).float().sum()

    with engine.forward():
        loss = compute()
    engine.backward(loss)
    assert engine.step(replay=compute).skipped
    engine.close()
    (autopsy,) = watch.autopsies
    assert (autopsy.cause, autopsy.at_scale_1) == ("backward", True)
    assert len(calls) == (3 if custom else 2)


def test_a_replay_whose_tensors_were_overwritten_is_repeated_with_measurements_at_once(monkeypatch):
    """The cause is the same as without the first attempt."""
    attempts = []

    class Changed(Probes):
        def read(self):
            attempts.append(self._at_once)
            if not self._at_once:
                raise OverwrittenError
            return super().read()

    monkeypatch.setattr("halfstep.watching.replay.Probes", Changed)
    monkeypatch.setattr("halfstep.watching.replay._bad_gradients", lambda replays: [])
    watch = Autopsies()
    train(watch, overflow_in_forward)
    assert attempts[:2] == [False, True]
    assert (watch.autopsies[0].cause, watch.autopsies[0].module) == CASES[overflow_in_forward]


def test_the_scaler_keeps_its_trajectory_whatever_the_cause():
    """A NaN datum is no scale problem, but the scale is lowered as its semantics have it."""
    watched, plain = train(Autopsies(), nan_in_data), train(None, nan_in_data)
    assert [entry[1] for entry in watched if isinstance(entry, tuple) and len(entry) == 3] == [
        entry[1] for entry in plain if isinstance(entry, tuple) and len(entry) == 3
    ]


def test_the_micro_batch_of_an_accumulated_window_is_named():
    """The second of two, with gradients of the first in the sum."""
    watch = Autopsies()
    left = train(watch, nan_in_data, accumulate=2)
    assert (watch.autopsies[0].cause, watch.autopsies[0].window_index) == ("data", 1)
    assert same(left, train(None, nan_in_data, accumulate=2))


def test_a_weight_that_is_not_finite_is_the_cause():
    """backward(weight=nan), as a tensor: its value is not known on the host."""
    watch = Autopsies()
    train(watch, weights=[torch.ones(()), torch.tensor(math.nan), torch.ones(())])
    assert (watch.autopsies[0].cause, watch.autopsies[0].op) == ("data", "weight")


def test_an_inf_that_the_forward_absorbs_is_still_the_cause():
    """tanh maps it to 1 and the loss is finite; the gradient of the weight is 0 * inf."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    watch = Autopsies()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=watch)
    x = torch.tensor([[math.inf, 1.0]])

    def compute():
        return model(x).square().mean()

    with engine.forward():
        loss = compute()
    engine.backward(loss)
    assert engine.step(replay=compute).skipped
    assert loss.isfinite()
    assert (watch.autopsies[0].cause, watch.autopsies[0].module) == ("data", "0")


class Late:
    """Examines a step when the next window has its gradients already, as on a GPU."""

    replay = True

    def __init__(self):
        self.autopsies, self.pending = [], None

    def delivered(self, result):
        if result.skipped:
            self.pending = result

    def between(self, engine, step):
        if self.pending is not None:
            self.autopsies.append(examine(engine.replays, self.pending.step, self.pending.scale))
            self.pending = None


@pytest.mark.parametrize("ruin", CASES, ids=lambda f: f.__name__)
def test_gradients_and_buffers_of_the_next_window_survive_a_late_autopsy(ruin):
    """Between the backward and the step of the next window, whose batch norm has new statistics; the fault is still there."""
    watch = Late()
    left = train(watch, ruin, between=watch.between, lasting=True, steps=4)
    expected = train(None, ruin, lasting=True, steps=4)
    assert same(left, expected)
    autopsy = watch.autopsies[0]
    assert (autopsy.step, autopsy.cause, autopsy.module) == (2, *CASES[ruin])


def test_a_replay_that_fails_is_reported_and_training_continues():
    """The user's function raises; the step was skipped, and that is all."""
    model = nn.Linear(2, 1)
    watch = Autopsies()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=watch)
    rng = torch.get_rng_state()

    def broken():
        torch.rand(3)
        raise KeyError("gone")

    with engine.forward():
        loss = model(torch.full((1, 2), math.nan)).mean()
    engine.backward(loss)
    engine.step(replay=broken)
    assert watch.autopsies[0].cause == "not replayed"
    assert "KeyError" in watch.autopsies[0].sentence
    assert torch.equal(rng, torch.get_rng_state())


def test_without_a_function_the_report_has_the_gradients_and_the_way_to_get_more():
    """What can be reported without a replay."""
    model = nn.Linear(2, 1)
    watch = Autopsies()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=watch)
    with engine.forward():
        loss = model(torch.full((1, 2), math.nan)).mean()
    engine.backward(loss)
    engine.step()
    assert "weight" in watch.autopsies[0].sentence
    assert "step(replay=" in watch.autopsies[0].advice


def test_gradient_release_reports_that_a_replay_cannot_be_exact():
    """Weights of other buckets have changed."""
    model = nn.Linear(2, 1)
    watch = Autopsies()
    engine = Engine(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), "bf16-lean", watch=watch, gradient_release=True
    )

    def compute():
        return model(torch.full((1, 2), math.nan)).mean()

    with engine.forward():
        loss = compute()
    engine.backward(loss)
    engine.step(replay=compute)
    assert watch.autopsies[0].cause == "not replayed"
    assert "gradient_release" in watch.autopsies[0].sentence


def test_compiled_code_is_replayed_in_eager_mode_and_not_compiled_again(monkeypatch):
    """The report shows it, and the next step uses the compiled code as before."""
    monkeypatch.setattr("halfstep.engine.compiling._options", lambda mode, budget: {"backend": "aot_eager"})
    watch = Autopsies()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    left = train(watch, nan_in_data, compile=True, precision="fp32", noisy=False)
    torch._dynamo.reset()
    frames = torch._dynamo.utils.counters["frames"]["total"]
    expected = train(None, nan_in_data, compile=True, precision="fp32", noisy=False)
    assert torch._dynamo.utils.counters["frames"]["total"] == 2 * frames
    torch._dynamo.reset()
    assert (watch.autopsies[0].cause, watch.autopsies[0].module) == ("data", "inner")
    assert watch.autopsies[0].notes[-1].startswith("compiled code was replayed in eager mode")
    assert same(left, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("ruin", CASES, ids=lambda f: f.__name__)
def test_on_a_gpu_the_outcome_of_an_earlier_step_is_examined(ruin):
    """One step late, with the next window's gradients in place."""
    torch.manual_seed(0)
    model = Net().cuda()
    watch = Autopsies()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = Engine(model, optimizer, "fp16", watch=watch, scaler=LossScaler(init_scale=2.0**10))
    for step, ((inputs, targets),) in enumerate(batches(4)):
        x, y = inputs.cuda(), targets.cuda()
        undo = ruin(model, x) if step == 1 else None

        def compute(x=x, y=y):
            return F.cross_entropy(model(x), y)

        with engine.forward():
            loss = compute()
        engine.backward(loss)
        result = engine.step(replay=compute)
        if undo is not None:
            assert result.skipped  # reads it, so that the autopsy runs before the fault is taken back
            undo()
    engine.close()
    assert (watch.autopsies[0].cause, watch.autopsies[0].module) == CASES[ruin]
