"""The promises of the Engine, as laws over presets, optimizers and random schedules."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_models import ADOPTED, LEAN, OPTIMIZERS, PRESETS, Net, batches, build, pairs, same, snapshot, train_step
from halfstep.engine.engine import Engine
from halfstep.scaling.scaler import LossScaler


@pytest.mark.parametrize(("precision", "optimizer"), pairs())
@pytest.mark.parametrize("first", [True, False], ids=["first-step", "later-step"])
def test_a_skipped_step_changes_nothing(precision, optimizer, first):
    """Weights, masters, moments, step counts, scheduler, average and buffers are bit-identical after a skip."""
    model, _, engine = build(precision, optimizer, ema=0.9, max_norm=1.0)
    data = batches(4)
    if not first:
        for batch in data[:3]:
            assert not train_step(model, engine, batch).skipped
    before = snapshot(model, engine)
    result = train_step(model, engine, data[3], poison=True)
    assert result.skipped
    assert same(before, snapshot(model, engine)) == []
    assert not train_step(model, engine, data[3]).skipped
    assert "model.head.weight" in same(before, snapshot(model, engine))


@settings(max_examples=40)
@given(
    pair=st.sampled_from(pairs()),
    where=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    value=st.sampled_from([math.inf, -math.inf, math.nan]),
    accumulate=st.integers(1, 3),
)
def test_one_bad_element_of_one_gradient_skips_the_whole_step(pair, where, value, accumulate):
    """An inf or NaN at any place of any gradient makes the step a no-op, in any micro-batch of the window."""
    precision, optimizer = pair
    model, _, engine = build(precision, optimizer, accumulate=accumulate, ema=0.9)
    data = batches(2 * accumulate)
    for batch in data[:accumulate]:
        train_step(model, engine, batch)
    before = snapshot(model, engine)
    params = list(model.parameters())
    target = params[where[0] % len(params)]
    bad_micro_batch = where[1] % accumulate
    for i, batch in enumerate(data[accumulate:]):
        handle = target.register_hook(lambda g: _poisoned(g, where[1], value)) if i == bad_micro_batch else None
        result = train_step(model, engine, batch)
        if handle is not None:
            handle.remove()
    assert result.boundary
    assert result.skipped
    assert same(before, snapshot(model, engine)) == []


def _poisoned(grad, where, value):
    grad = grad.clone()
    grad.view(-1)[where % grad.numel()] = value
    return grad


class Smooth(torch.nn.Module):
    """No batch statistics, so that micro-batches add up to a batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@settings(max_examples=25)
@given(
    # A scale of 65536 times a weight of 12 may overflow fp16 in the first window, rightly; start lower.
    precision=st.sampled_from(["fp32", "bf16", "bf16-lean"] + [f"{p},loss_scale=256" for p in ("fp16", "fp16-lean")]),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    as_tensor=st.booleans(),
    close_short=st.booleans(),
)
def test_weighted_micro_batches_equal_one_large_batch(precision, sizes, as_tensor, close_short):
    """Micro-batches of any sizes, weighed by them, give the large batch's norm and update within rounding."""
    data = batches(1, size=sum(sizes))[0]
    tolerance = 2e-6 if precision == "fp32" else 2e-2
    outcomes = []
    for parts in ([sum(sizes)], sizes):
        torch.manual_seed(0)
        model = Smooth()
        window = len(parts) + (1 if close_short else 0)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(model, opt, precision, accumulate=window, max_norm=1e9)
        start = 0
        for i, size in enumerate(parts):
            piece = tuple(t[start : start + size] for t in data)
            start += size
            with engine.forward():
                loss = F.cross_entropy(model(piece[0]), piece[1])
            engine.backward(loss, torch.tensor(float(size)) if as_tensor else size)
            result = engine.step(last=i == len(parts) - 1)
        assert result.boundary
        outcomes.append((result.grad_norm, engine.masters()))
    (norm_a, a), (norm_b, b) = outcomes
    assert norm_b == pytest.approx(norm_a, rel=tolerance)
    for name in a:
        assert torch.allclose(a[name], b[name], atol=tolerance * 0.1, rtol=tolerance), name


def test_unweighted_micro_batches_are_averaged():
    """Without weights the window is the mean, whatever its length, also when it is closed early."""
    for count in (1, 2, 4):
        torch.manual_seed(0)
        model = Smooth()
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=4)
        batch = batches(1)[0]
        for i in range(count):
            with engine.forward():
                loss = F.cross_entropy(model(batch[0]), batch[1])
            engine.backward(loss)
            result = engine.step(last=i == count - 1)
        expected = getattr(test_unweighted_micro_batches_are_averaged, "norm", result.grad_norm)
        test_unweighted_micro_batches_are_averaged.norm = expected
        assert result.grad_norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("precision", "optimizer"), pairs())
@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_clipping_is_on_true_gradients_and_the_norm_is_true(precision, optimizer, max_norm):
    """The reported norm is the float64 norm to fp32 rounding, and the update is clip-then-step."""
    batch = batches(1)[0]
    torch.manual_seed(3)
    twin = Smooth()
    weights = {n: p.detach().clone() for n, p in twin.named_parameters()}
    model, _, engine = build(precision, optimizer, model=Smooth(), max_norm=max_norm, schedule=False)
    for name, param in model.named_parameters():
        param.data.copy_(weights[name])
        if precision in LEAN:
            engine.optimizers[0].state[param].pop("low", None)
            engine.optimizers[0].state[param].pop("master", None)
            engine.optimizers[0].start_master(param, None)
    start = {n: t.clone() for n, t in engine.masters().items()}
    seen = {}
    for name, param in model.named_parameters():
        param.register_hook(lambda g, name=name: seen.__setitem__(name, g.detach().double().clone()))
    scale = engine.scaler.get_scale()
    result = train_step(model, engine, batch)
    grads = {name: g / scale for name, g in seen.items()}
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)
    factor = min(1.0, max_norm / (norm + 1e-6))
    reference = {n: torch.nn.Parameter(start[n].double()) for n in grads}
    for name, param in reference.items():
        param.grad = grads[name] * factor
    make = OPTIMIZERS[optimizer] if optimizer != "adagrad" else (lambda p: torch.optim.Adagrad(p, lr=0.05))
    make(list(reference.values())).step()
    loose = 1e-2 if "states=bf16" in precision else 2e-6
    for name, after in engine.masters().items():
        moved = (reference[name] - start[name].double()).detach()
        assert torch.allclose(
            after.double() - start[name].double(), moved, rtol=3e-3, atol=loose * moved.abs().max() + 1e-7
        ), name


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
def test_the_gradient_of_a_growth_step_is_divided_by_its_own_scale(precision):
    """The scale doubles after the step that earned it: DeepSpeed divides that step by the new scale and halves it."""
    norms = []
    for interval in (1, 1000):
        torch.manual_seed(0)
        model = Smooth()
        scaler = LossScaler(semantics="torch", init_scale=256.0, growth_interval=interval)
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), precision, scaler=scaler)
        norms.append([train_step(model, engine, batches(1)[0]).grad_norm for _ in range(4)])
    assert scaler.get_scale() == 256.0
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_16_bit_accumulation_stagnates_in_torch_and_not_here():
    """1024 micro-batches of gradient 1 average to 1 here; summed in bf16 they stop at 256, a quarter."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    for _ in range(1024):
        weight.sum().backward()
    assert (weight.grad / 1024).tolist() == [0.25] * 4

    class One(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4))

        def forward(self):
            return self.w.sum()

    model = One()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), "bf16-lean", accumulate=1024)
    for _ in range(1024):
        with engine.forward():
            loss = model()
        engine.backward(loss)
        result = engine.step()
    assert result.grad_norm == pytest.approx(2.0)
    assert engine.masters()["w"].tolist() == [0.0] * 4


def test_f6_a_loop_inside_one_autocast_region_freezes_stock_torch():
    """Fault F6 on stock torch: cast weights stay cached, so the loss does not move."""
    losses = []
    torch.manual_seed(0)
    model, (x, y) = Smooth(), batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(4):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert len(set(losses)) == 1


def test_f6_here_the_region_ends_before_the_step_and_the_loss_moves():
    """Fault F6 held: a step inside the region is rejected, and the right loop learns."""
    model, _, engine = build("bf16", "sgd", model=Smooth(), schedule=False)
    x, y = batches(1)[0]
    losses = []
    for _ in range(4):
        with engine.forward():
            loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            with pytest.raises(ValueError, match="inside `with engine.forward"):
                engine.step()
        engine.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4


@settings(max_examples=25)
@given(data=st.data())
def test_random_interleavings_never_corrupt_the_state(data):
    """Any order of training, evaluating, saving, loading and mistakes ends in the weights of the plain run."""
    precision = data.draw(st.sampled_from(PRESETS))
    optimizer = data.draw(st.sampled_from(ADOPTED))
    accumulate = data.draw(st.integers(1, 2))
    stream = batches(6)
    model, _, engine = build(precision, optimizer, accumulate=accumulate, ema=0.8, max_norm=1.0)
    path, saved = [], ([], _copy(engine.state_dict()))
    for _ in range(data.draw(st.integers(1, 14))):
        action = data.draw(st.sampled_from(["train", "train", "skip", "evaluate", "save", "load", "mistake"]))
        if action in {"train", "skip"}:
            for _ in range(accumulate):
                pick = data.draw(st.integers(0, 5))
                train_step(model, engine, stream[pick], poison=action == "skip")
                path.append((pick, action == "skip"))
        elif action == "evaluate":
            with engine.evaluate(ema=data.draw(st.booleans())):
                model(stream[0][0])
        elif action == "save":
            saved = (list(path), _copy(engine.state_dict()))
        elif action == "load":
            engine.load_state_dict(_copy(saved[1]))
            path = list(saved[0])
        else:
            with pytest.raises(ValueError, match="without engine.backward"):
                engine.step()
            F.cross_entropy(
                model.eval()(stream[0][0].to(next(model.parameters()).dtype)).float(), stream[0][1]
            ).backward()
            model.train()
            with pytest.raises(ValueError, match="bare loss.backward"), engine.forward():
                engine.backward(model.head.weight.sum())
            model.zero_grad()
    plain_model, _, plain = build(precision, optimizer, accumulate=accumulate, ema=0.8, max_norm=1.0)
    for pick, poison in path:
        train_step(plain_model, plain, stream[pick], poison=poison)
    assert same(snapshot(plain_model, plain), snapshot(model, engine)) == []
    assert plain.scaler.state_dict() == engine.scaler.state_dict()


def _copy(tree):
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {k: _copy(v) for k, v in tree.items()}
    return [_copy(v) for v in tree] if isinstance(tree, list) else tree


def test_a_net_with_batch_norm_recovers_from_an_overflowing_forward():
    """NaN in running statistics, which stock training keeps for ever, is undone with the step."""
    model = Net()
    model(torch.full((4, 6), math.inf))
    assert model.batch.running_mean.isnan().any()
    model, _, engine = build("bf16", "adamw")
    train_step(model, engine, batches(1)[0], poison=True)
    assert model.batch.running_mean.isfinite().all()
    assert model.batch.num_batches_tracked.item() == 0
    assert model.seen.item() == 0
